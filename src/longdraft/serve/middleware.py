"""Middleware that checks each request before an endpoint sees it: host name, API key, body size and time, encoding.

The middleware also adds CORS headers, and closes connections while the server shuts down.
"""

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

# A request target in absolute form, as sent to a proxy: GET http://host/path.
_ABSOLUTE_FORM = re.compile(r"https?://(?:[^/]*@)?([^/@]*)(/.*)?", re.IGNORECASE | re.DOTALL)
# Paths that are served without a key. The page at / asks for the key itself.
PUBLIC_PATHS = ("/", "/health", "/ready", "/version", "/metrics")


class GuardMiddleware:
    """ASGI middleware that checks requests and passes valid ones to ``app``.

    Args:
        is_draining: if it returns True, connections are closed after their response. A client could otherwise keep the
            server from shutting down, with one request after another on a connection.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, is_draining: Callable[[], bool] = lambda: False) -> None:
        self._app, self._hosts, self._keys, self._is_draining = app, settings.hosts, settings.keys, is_draining
        self._max_body_bytes, self._body_timeout = settings.max_body_bytes, settings.body_timeout
        self._outermost: ASGIApp = self._check_and_pass
        if settings.origins:  # CORS wraps the checks, so that their errors have its headers too
            self._outermost = CORSMiddleware(
                self._check_and_pass, settings.origins, allow_methods=["GET", "POST"], allow_headers=["*"],
                expose_headers=["Retry-After"],
            )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outermost(scope, receive, send)

    async def _check_and_pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that fails a check with the error. Passes any other request to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if match := _ABSOLUTE_FORM.fullmatch(scope["path"]):
            host, scope = match[1], {**scope, "path": match[2] or "/"}
        if self._is_draining():
            send = _with_connection_close(send)
        body = None
        try:
            self._check_host(host)
            scope.setdefault("state", {})["tenant"] = self._authenticate(scope["path"], headers)
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > self._max_body_bytes:
                raise self._too_large()
            body = await self._read_body(receive)
            encoding = headers.get("content-encoding", "").strip().lower().removeprefix("x-")  # x-gzip is gzip
            if body and encoding not in ("", "identity"):
                body = await asyncio.to_thread(self._decompress, body, encoding)
        except ApiError as error:
            # After a timeout of the body (408) or a disconnect (499) there is nothing left to read.
            unread = body is None and error.status not in (408, 499)
            await error.response(scope, connection="close")(scope, receive, lambda x: send({**x, "more_body": unread}))
            if unread:  # if the connection closed now, a client that still sends would not see the error
                with contextlib.suppress(ApiError):
                    await self._read_body(receive, discard=True)
                await send({"type": "http.response.body"})
            return
        # HEAD is answered like GET, and uvicorn leaves the body out. Only /v1/messages has a HEAD endpoint.
        if scope["method"] == "HEAD" and not scope["path"].startswith("/v1/messages"):
            scope = {**scope, "method": "GET"}
        await self._app(scope, replay_body(body, receive), send)

    def _check_host(self, host: str) -> None:
        """Refuses unknown host names: a web page could make its own name resolve to this server (DNS rebinding)."""
        name = re.sub(r":\d*$", "", host.lower()).strip("[]").removesuffix(".")
        if not host or any(fnmatchcase(name, pattern.lower()) for pattern in self._hosts):
            return
        if "0.0.0.0" in self._hosts and re.fullmatch(r"[\d.]+|[\da-f:.]*:[\da-f:.]*", name):  # any IP address
            return
        raise ApiError(403, f"The host name {name!r} is not allowed: start the server with --allow-host.", code="host")

    def _authenticate(self, path: str, headers: Headers) -> str | None:
        """Returns the tenant of the request's API key; None if no key is needed. Raises ApiError for a wrong key."""
        if not self._keys or path in PUBLIC_PATHS:
            return None
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        bearer = credentials.strip() if scheme.lower() == "bearer" else ""
        tenant = None
        # Compares with all keys, each in constant time, so that the time reveals nothing about them.
        for name, key in self._keys.items():
            for sent_key in (bearer, headers.get("x-api-key", "").strip()):
                if hmac.compare_digest(sent_key.encode(), key.encode()):
                    tenant = name
        if tenant is None:
            raise ApiError(
                401, "Give a valid API key: Authorization: Bearer KEY, or x-api-key: KEY.", "authentication_error",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return tenant

    async def _read_body(self, receive: Receive, discard: bool = False) -> bytes:
        """Reads the body (``discard``: returns b""). Raises ApiError for a large or slow body, or a lost connection."""
        parts, size, deadline = [], 0, time.monotonic() + self._body_timeout
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(0.01, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise ApiError(408, "The request's body did not arrive in time.") from None
            if message["type"] == "http.disconnect":
                raise ApiError(499, "The client disconnected.")
            parts.append(b"" if discard else message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _decompress(self, body: bytes, encoding: str) -> bytes:
        """Decodes a compressed body. Raises ApiError if the encoding is unknown, or the body too large or damaged."""
        if encoding not in ("gzip", "deflate"):
            raise ApiError(
                415, f"Bodies may be in gzip or deflate, not in {encoding!r}.", param="Content-Encoding",
                headers={"Accept-Encoding": "gzip, deflate"},
            )  # fmt: skip
        # zlib's window_bits: 31 for gzip, 15 for deflate, -15 for deflate without zlib's header, which some clients
        # leave out. The header's first byte has 8 in the low four bits.
        window_bits = 31 if encoding == "gzip" else 15 if body[:1] and body[0] & 15 == 8 else -15
        decompressor = zlib.decompressobj(window_bits)
        with contextlib.suppress(zlib.error):
            content = decompressor.decompress(body, self._max_body_bytes + 1)
            if len(content) > self._max_body_bytes:
                raise self._too_large()
            if decompressor.eof and not decompressor.unused_data:
                return content
        raise ApiError(400, f"The body is not one complete {encoding} stream.", param="Content-Encoding")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"A request may have {self._max_body_bytes} bytes: shorten it.", code="request_too_large")


def _with_connection_close(send: Send) -> Send:
    """Returns a ``send`` that adds ``Connection: close`` to the response."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_and_close


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Returns a ``receive`` that first gives ``body``, which was read before, then further messages (a disconnect)."""
    pending = [body]

    async def replay() -> Message:
        return {"type": "http.request", "body": pending.pop(), "more_body": False} if pending else await receive()

    return replay
