"""The front of replicas: passes each request to a replica, to another one if that is lost, and returns the answer.

This module knows nothing of Ray (see :mod:`longdraft.serve.replicas`). It defines what is passed on, the key by which
requests with the same prefix find the same replica, and what happens when a replica is lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longdraft.serve.errors import ApiError, api_error
from longdraft.serve.guards import replayed
from longdraft.serve.metrics import merged
from longdraft.serve.openai import event
from longdraft.serve.worker import Draining

# How many characters of a text its key depends on.
_PREFIX = 1024
# How many replicas a request is tried on, and seconds between two attempts.
_ATTEMPTS, _PAUSE = 6, 0.25
# The type of a message behind an answer: the metrics of the replica that gave it.
METRICS = "longdraft.metrics"
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client",
          "server")  # fmt: skip


@dataclass(frozen=True)
class Forwarded:
    """A request as a replica gets it.

    Attributes:
        prefix: the beginning of its text; empty if it has none.
    """

    scope: dict[str, Any]
    body: bytes
    prefix: str = ""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> Forwarded:
        kept = {name: scope[name] for name in _SCOPE if name in scope}
        kept["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        return cls(kept, body, beginning(body) if scope["method"] == "POST" else "")

    @property
    def key(self) -> str:
        """Equal for requests whose texts begin alike; empty if there is no text."""
        return hashlib.sha256(self.prefix.encode("utf-8", "replace")).hexdigest()[:32] if self.prefix else ""


class Lost(Exception):
    """The replica that had the request is gone."""


def beginning(body: bytes) -> str:
    """The text by which requests are grouped: ``prompt_cache_key``, else the beginning of the first message that is not
    the system's (many conversations share that one), else of the prompt."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(fields, dict):
        return ""
    if isinstance(key := fields.get("prompt_cache_key"), str) and key:
        return key
    text = fields.get("messages", fields.get("input", fields.get("prompt", "")))
    if isinstance(text, list) and text and isinstance(text[0], dict):
        turns = [turn for turn in text if isinstance(turn, dict) and turn.get("role") not in ("system", "developer")]
        text = (turns or text)[0].get("content", "")
    return (text if isinstance(text, str) else json.dumps(text))[:_PREFIX] if text else ""


class Relay:
    """ASGI application.

    Args:
        ask: hands a request to a replica and yields its answer's messages. Raises Lost if the replica is lost; the
            client gets any other error.
        able: whether there is a replica to ask; None: always.

    Attributes:
        ongoing: how many requests have not been answered completely.
        draining: refuse new requests.
        pages: the latest metrics of each replica, which come behind its answers (:data:`METRICS`), and when they were
            made.
    """

    def __init__(
        self,
        ask: Callable[[Forwarded], AsyncIterator[Message]],
        able: Callable[[], Awaitable[bool]] | None = None,
        pause: float = _PAUSE,
    ) -> None:
        self._ask, self._able, self._pause = ask, able, pause
        self.ongoing, self.draining = 0, False
        self.pages: dict[str, tuple[float, str]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] in ("/health", "/ready"):  # answered here: must not wait behind requests
            ready = not self.draining and (self._able is None or await self._able())
            state = {"status": "ok", "ready": ready, "running": self.ongoing}
            await JSONResponse(state, 200 if ready or scope["path"] == "/health" else 503)(scope, receive, send)
            return
        if scope["path"] == "/metrics":
            page = merged({replica: page for replica, (_, page) in self.pages.items()})
            await Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")(scope, receive, send)
            return
        if self.draining:
            await _response(api_error(Draining("The server is shutting down.")))(scope, receive, send)
            return
        self.ongoing += 1
        try:
            message = await receive()
            request = await asyncio.to_thread(Forwarded.of, scope, message.get("body", b""))
            begun, error = await self._relay(request, send)
            if error is not None and begun:  # the status has been sent: the error is an event
                await send({"type": "http.response.body", "body": event(error.body).encode()})
            elif error is not None:
                await _response(error)(scope, receive, send)
        finally:
            self.ongoing -= 1

    async def _relay(self, request: Forwarded, send: Send) -> tuple[bool, ApiError | None]:
        """Sends a replica's answer. If the replica is lost before any of it was sent, another one begins again.

        Returns:
            Whether an answer has begun, and the error that ended it.
        """
        attempt = 1
        while True:
            begun, head = False, None
            try:
                async for part in self._ask(request):
                    if part["type"] == METRICS:
                        page = part["made"], part["page"]  # answers that end together may come in another order
                        self.pages[part["replica"]] = max(page, self.pages.get(part["replica"], page))
                        continue
                    if part["type"] == "http.response.start":
                        head = part
                        continue
                    if not begun and head is not None:
                        begun = True
                        await send(head)
                    await send(part)
                return begun, None
            except Lost:
                if begun or attempt == _ATTEMPTS:
                    message = "The replica that had this request is gone."
                    return begun, ApiError(503, message, "server_error", code="lost")
                await asyncio.sleep(self._pause * attempt)
                attempt += 1
            except Exception as error:
                return begun, api_error(error)


def _response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


async def answer(app: ASGIApp, request: Forwarded) -> AsyncIterator[Message]:
    """Yields the messages of an application's answer. When the iteration stops early, the application is cancelled."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def never() -> Message:
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    async def run() -> None:
        try:
            await app(dict(request.scope), replayed(request.body, never), send)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        task.cancel()
