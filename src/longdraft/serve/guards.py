"""What every request goes through before an endpoint sees it: its size, how long its body takes, and its key."""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longdraft.serve.errors import ApiError

# What is served without a key: whether the server lives, and the page, which asks for one.
OPEN = ("/", "/health", "/ready", "/version", "/metrics")


class Guards:
    """ASGI middleware.

    Args:
        keys: tenant -> API key; empty: none is asked for. max_body: bytes. body_seconds: that one may take to arrive.
    """

    def __init__(self, app: ASGIApp, keys: dict[str, str], max_body: int, body_seconds: float) -> None:
        self._app, self._keys, self._most, self._seconds = app, keys, max_body, body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            scope.setdefault("state", {})["tenant"] = self._tenant(scope["path"], headers)
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > self._most:
                raise self._too_large()
            body = await self._body(receive)
        except ApiError as error:
            await _answer(send, error)
            return
        await self._app(scope, _replayed(body, receive), send)

    def _tenant(self, path: str, headers: dict[str, str]) -> str | None:
        if not self._keys or path in OPEN:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        found = None
        # All are compared, each in constant time: how long it takes says nothing of which came near.
        for tenant, key in self._keys.items():
            if hmac.compare_digest(given.strip().encode(), key.encode()) and kind.lower() == "bearer":
                found = tenant
        if found is None:
            raise ApiError(
                401, "Give a valid API key: Authorization: Bearer KEY.", "authentication_error", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return found

    async def _body(self, receive: Receive) -> bytes:
        """Raises ApiError for one that is too large, or does not come to its end; and where the client goes away."""
        parts, size, until = [], 0, time.monotonic() + self._seconds
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(0.01, until - time.monotonic()))
            except asyncio.TimeoutError:
                raise ApiError(408, "The request's body did not come to its end in time.") from None
            if message["type"] == "http.disconnect":
                raise ApiError(499, "The client went away.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"A request has {self._most} bytes at most here.", code="request_too_large")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one piece; then whatever comes, such as that the client went away."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(send: Send, error: ApiError) -> None:
    import json

    body = json.dumps(error.body).encode()
    headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
