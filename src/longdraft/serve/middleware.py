"""Checks on every request before an endpoint sees it: the name it calls the server by, its size, how long its body
takes, and its API key; what pages of other origins may read; and the end of connections while the server shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import time
import zlib
from collections.abc import Callable
from fnmatch import fnmatchcase

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longdraft.serve.errors import ApiError
from longdraft.serve.settings import ServerSettings

# A request's target with the server's name.
_WHOLE = re.compile(r"https?://(?:[^/]*@)?([^/@]*)(/.*)?", re.IGNORECASE | re.DOTALL)
# Served without a key: whether the server lives, and the page, which asks for one.
PUBLIC_PATHS = ("/", "/health", "/ready", "/version", "/metrics")


class GuardMiddleware:
    """ASGI middleware.

    Args:
        settings: of the server: names, origins, keys and limits.
        leaving: whether connections shall end with their answers; or a client that asks again and again on one would
            keep a server that shuts down for ever.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._hosts, self._keys, self._leaving = app, settings.hosts, settings.keys, leaving
        self._max_body, self._body_seconds = settings.max_body_bytes, settings.body_timeout
        self._outer: ASGIApp = self._checked
        if settings.origins:  # refusals too can be read there
            self._outer = CORSMiddleware(
                self._checked, settings.origins, allow_methods=["GET", "POST"], allow_headers=["*"],
                expose_headers=["Retry-After"],
            )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outer(scope, receive, send)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if whole := _WHOLE.fullmatch(scope["path"]):  # as to a proxy: GET http://host/path
            host, scope = whole[1], {**scope, "path": whole[2] or "/"}
        if self._leaving():
            send = _last(send)
        body = None
        try:
            self._check_host(host)
            scope.setdefault("state", {})["tenant"] = self._tenant(scope["path"], headers)
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > self._max_body:
                raise self._too_large()
            body = await self._body(receive)
            coding = headers.get("content-encoding", "").strip().lower().removeprefix("x-")
            if body and coding not in ("", "identity"):
                body = await asyncio.to_thread(self._decoded, body, coding)
        except ApiError as error:
            more = body is None and error.status not in (408, 499)
            await error.response(scope, connection="close")(scope, receive, lambda x: send({**x, "more_body": more}))
            if more:  # an end before the body's would reset the connection, and the client miss the answer
                with contextlib.suppress(ApiError):
                    await self._body(receive, kept=False)
                await send({"type": "http.response.body"})
            return
        if scope["method"] == "HEAD" and not scope["path"].startswith("/v1/messages"):  # uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        await self._app(scope, replay_body(body, receive), send)

    def _check_host(self, host: str) -> None:
        """Refuses names that are not the server's: a page can have one of its own point here (DNS rebinding)."""
        name = re.sub(r":\d*$", "", host.lower()).strip("[]").removesuffix(".")
        if not host or any(fnmatchcase(name, known.lower()) for known in self._hosts):
            return
        if "0.0.0.0" in self._hosts and re.fullmatch(r"[\d.]+|[\da-f:.]*:[\da-f:.]*", name):
            return
        raise ApiError(403, f"This server goes by other names than {name!r}: start it with --allow-host.", code="host")

    def _tenant(self, path: str, headers: Headers) -> str | None:
        if not self._keys or path in PUBLIC_PATHS:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        bearer = given.strip() if kind.lower() == "bearer" else ""
        tenant = None
        # Compares all keys, each in constant time, so that the time tells nothing about which came near.
        for name, key in self._keys.items():
            for given in (bearer, headers.get("x-api-key", "").strip()):
                if hmac.compare_digest(given.encode(), key.encode()):
                    tenant = name
        if tenant is None:
            raise ApiError(
                401, "Give a valid API key: Authorization: Bearer KEY, or x-api-key: KEY.", "authentication_error",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return tenant

    async def _body(self, receive: Receive, kept: bool = True) -> bytes:
        """Raises ApiError if it is too large or too slow, or the client disconnects."""
        parts, size, until = [], 0, time.monotonic() + self._body_seconds
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(0.01, until - time.monotonic()))
            except asyncio.TimeoutError:
                raise ApiError(408, "The request's body did not come to its end in time.") from None
            if message["type"] == "http.disconnect":
                raise ApiError(499, "The client went away.")
            parts.append(message.get("body", b"") if kept else b"")
            size += len(parts[-1])
            if size > self._max_body:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _decoded(self, body: bytes, coding: str) -> bytes:
        """A body without its content coding. Raises ApiError if that is unknown, or it is too large or damaged."""
        if coding not in ("gzip", "deflate"):
            raise ApiError(
                415, f"Bodies in gzip and deflate are read, and none in {coding!r}.", param="Content-Encoding",
                headers={"Accept-Encoding": "gzip, deflate"},
            )  # fmt: skip
        # What is called deflate has zlib's frame, which begins with 8 in four bits; some send it without.
        frame = 31 if coding == "gzip" else 15 if body[:1] and body[0] & 15 == 8 else -15
        reader = zlib.decompressobj(frame)
        with contextlib.suppress(zlib.error):
            found = reader.decompress(body, self._max_body + 1)
            if len(found) > self._max_body:
                raise self._too_large()
            if reader.eof and not reader.unused_data:
                return found
        raise ApiError(400, f"The body is not one whole stream of {coding}.", param="Content-Encoding")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"A request has {self._max_body} bytes at most here.", code="request_too_large")


def _last(send: Send) -> Send:
    """A ``send`` whose answer is the last one on its connection."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return sending


def replay_body(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body in one piece, and then what the other gives, such as a disconnect."""
    pending = [body]

    async def replay() -> Message:
        if not pending:
            return await receive()
        return {"type": "http.request", "body": pending.pop(), "more_body": False}

    return replay
