"""Limits of what uvicorn leaves open: connections without a request, their number, and messages in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Connections that may be accepted at a time, before one of them is looked at.
BACKLOG = 64
# Messages of a logger in a minute; the log would grow with what anybody sends.
_MESSAGES = 100


def most() -> int:
    """Returns the limit of open connections: with those about to open, half of the files that the process may have."""
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # not on Windows
        files = 512
    files = 65536 if files < 0 else files
    return max(16, min(4096, files // 2 - 2 * BACKLOG))


class Connection(H11Protocol):
    """A connection that is closed if a request's headers take too long, or if others need its place before they came.

    Attributes:
        seconds: that the headers may take. most: connections that may be open.
    """

    seconds, most = 30.0, 512

    @classmethod
    def limited(cls, seconds: float) -> type[Connection]:
        """A class of connections with limits for this process."""
        return type(cls.__name__, (cls,), {"seconds": seconds, "most": most()})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._late: asyncio.TimerHandle | None = None
        self._wait()
        super().connection_made(transport)
        if len(self.connections) > self.most:
            idle = [each for each in self.connections if isinstance(each, Connection) and each._late is not None]
            oldest = min(idle, key=lambda each: each._late.when() if each._late else 0.0, default=self)
            oldest._forget()
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Sets a limit of time while a request's headers are awaited."""
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(self.seconds, lambda: self.transport.close())

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Sparse(logging.Filter):
    """Lets a hundred messages of each logger pass in a minute, and says that there were more."""

    def __init__(self) -> None:
        super().__init__()
        self._minutes: dict[str, tuple[int, int]] = {}

    def filter(self, record: Any) -> bool:
        now = int(time.monotonic() // 60)
        minute, count = self._minutes.get(record.name, (now, 0))
        count = count + 1 if minute == now else 1
        self._minutes[record.name] = now, count
        if count == _MESSAGES:
            record.msg, record.args, record.exc_info = "Further messages of this minute are left out.", (), None
        return count <= _MESSAGES


_sparse = Sparse()


def bound_logs() -> None:
    """Bounds the messages of the server's loggers."""
    for name in ("uvicorn.error", "uvicorn.access", "asyncio", "longdraft"):
        logging.getLogger(name).addFilter(_sparse)
