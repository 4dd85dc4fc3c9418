"""In front of replicas: a request goes to one of them, to another where that one is lost, and its answer comes back.

What carries requests is somebody else's (:mod:`longdraft.serve.replicas`: Ray): here is what is handed over, by which
key requests of one prefix find the same replica, and what happens where one dies.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longdraft.serve.errors import ApiError, api_error
from longdraft.serve.openai import event
from longdraft.serve.worker import Draining

# Characters of a prompt by which requests are told apart: what comes behind them may be told by no replica.
_PREFIX = 1024
# Replicas that a request is tried on, one after another, and seconds between two of them.
_ATTEMPTS, _PAUSE = 6, 0.25
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client",
          "server")  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request as a replica gets it.

    Attributes:
        prompt: the beginning of its text; empty where it has none.
    """

    scope: dict[str, Any]
    body: bytes
    prompt: str = ""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> Asked:
        kept = {name: scope[name] for name in _SCOPE if name in scope}
        kept["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        return cls(kept, body, beginning(body) if scope["method"] == "POST" else "")

    @property
    def key(self) -> str:
        """The same for requests whose texts begin alike; empty where there is no text."""
        return hashlib.sha256(self.prompt.encode("utf-8", "replace")).hexdigest()[:32] if self.prompt else ""


class Lost(Exception):
    """The replica that had the request is gone."""


def beginning(body: bytes) -> str:
    """What tells texts with different prefixes apart: ``prompt_cache_key``; else the beginning of the first message
    that is not the system's, which many conversations share; else that of the prompt."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    if isinstance(key := asked.get("prompt_cache_key"), str) and key:
        return key
    said = asked.get("messages", asked.get("input", asked.get("prompt", "")))
    if isinstance(said, list) and said and isinstance(said[0], dict):
        own = [turn for turn in said if isinstance(turn, dict) and turn.get("role") not in ("system", "developer")]
        said = (own or said)[0].get("content", "")
    return (said if isinstance(said, str) else json.dumps(said))[:_PREFIX] if said else ""


class Relay:
    """ASGI application.

    Args:
        ask: hands a request to a replica, and gives the messages of its answer. It raises Lost where the replica is
            lost; what else it raises is answered.

    Attributes:
        ongoing: requests that have not been answered to their end.
        draining: no more are taken.
    """

    def __init__(self, ask: Callable[[Asked], AsyncIterator[Message]], pause: float = _PAUSE) -> None:
        self._ask, self._pause = ask, pause
        self.ongoing, self.draining = 0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] in ("/health", "/ready"):  # never behind requests that wait
            ready = not self.draining or scope["path"] == "/health"
            said = {"status": "ok", "ready": not self.draining, "running": self.ongoing}
            await _whole(send, 200 if ready else 503, said)
            return
        if scope["path"] == "/metrics":
            error = ApiError(404, "Each replica counts its own requests: Ray's metrics have those of all.")
            await _whole(send, error.status, error.body)
            return
        if self.draining:
            await _refused(send, api_error(Draining("The server is shutting down.")))
            return
        self.ongoing += 1
        try:
            message = await receive()
            await self._relayed(Asked.of(scope, message.get("body", b"")), send)
        finally:
            self.ongoing -= 1

    async def _relayed(self, asked: Asked, send: Send) -> None:
        """A request whose answer has not begun to be sent is begun again elsewhere, whatever was decoded of it."""
        for attempt in range(1, _ATTEMPTS + 1):
            begun, head = False, None
            try:
                async for message in self._ask(asked):
                    if message["type"] == "http.response.start":
                        head = message
                        continue
                    if not begun and head is not None:
                        begun = True
                        await send(head)
                    await send(message)
                return
            except Lost:
                error = ApiError(503, "The replica that had this request is gone.", "server_error", code="lost")
                if not begun and attempt < _ATTEMPTS:
                    await asyncio.sleep(self._pause * attempt)
                    continue
            except Exception as raised:
                error = api_error(raised)
            if not begun:
                await _refused(send, error)
            else:  # the status has been sent: the error is an event
                await send({"type": "http.response.body", "body": event(error.body).encode()})
            return


async def answer(app: ASGIApp, asked: Asked) -> AsyncIterator[Message]:
    """An application's answer to a request, message by message. Whoever stops listening is a client that went away."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    given, never = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal given
        if given:
            await never.wait()
        given = True
        return {"type": "http.request", "body": asked.body, "more_body": False}

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    async def answering() -> None:
        try:
            await app(dict(asked.scope), receive, send)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(answering())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        task.cancel()


async def _refused(send: Send, error: ApiError) -> None:
    await _whole(send, error.status, error.body, error.headers)


async def _whole(send: Send, status: int, said: dict[str, Any], more: dict[str, str] | None = None) -> None:
    body = json.dumps(said).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **(more or {})}
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
