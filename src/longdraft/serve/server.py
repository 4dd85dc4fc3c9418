"""The server process: uvicorn with limits for what it leaves open, the worker, and how they start and end together."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from longdraft.errors import RequestError
from longdraft.serve.app import make_app
from longdraft.serve.service import Service

# Connections that may be accepted at a time, before one of them is looked at.
BACKLOG = 64


def _most() -> int:
    """Half of the files that this process may have, less the connections that are about to open."""
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # not on Windows
        files = 512
    files = 65536 if files < 0 else files
    return max(16, min(4096, files // 2 - 2 * BACKLOG))


class LimitedConnection(H11Protocol):
    """A connection that is closed if a request's headers take too long, or if others need its place before they came.

    Attributes:
        seconds: that the headers may take. most: connections that may be open.
    """

    seconds: float
    most: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._late: asyncio.TimerHandle | None = None
        self._wait()
        super().connection_made(transport)
        if len(self.connections) > self.most:
            idle = [each for each in self.connections if isinstance(each, LimitedConnection) and each._late is not None]
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


class Server(uvicorn.Server):
    """Drains on SIGTERM and Ctrl-C: ongoing requests are answered, new ones get 503. A second signal ends everything.

    Args:
        drain: seconds that the last answers may take.
    """

    def __init__(
        self, service: Service, host: str, port: int, drain_timeout: float = 300.0, access_log: bool = False
    ) -> None:
        settings = service.settings
        limits = {"seconds": settings.body_timeout, "most": settings.connections or _most()}
        config = uvicorn.Config(
            make_app(service), host=host, port=port,
            log_level="info" if access_log else "error",  # the log would grow with what anybody sends
            access_log=access_log, timeout_keep_alive=30, http=type("Limited", (LimitedConnection,), limits), ws="none",
            backlog=BACKLOG, timeout_graceful_shutdown=10,  # all has been answered by then
        )  # fmt: skip
        if not access_log:
            logging.getLogger("asyncio").setLevel(logging.ERROR)
        super().__init__(config)
        self._service, self._drain = service, drain_timeout
        self._signals = 0

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._signals += 1
        if self._signals > 1:
            self.force_exit = self.should_exit = True
            return
        threading.Thread(target=self._end, name="longdraft drain").start()

    def _end(self) -> None:
        # Keeps listening meanwhile, to answer new requests with 503.
        self._service.worker.close(self._drain)
        self.should_exit = True

    def run_with_engine(self, on_listening: Callable[[int], None]) -> None:
        """Listens in a new thread and decodes in this one, the main thread, until the server has ended.

        Args:
            listens: called with the port once the server listens.

        Raises:
            RequestError: the address cannot be used.
        """
        listening = threading.Thread(target=self._listen, name="longdraft http", daemon=True)
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self.handle_exit)
        listening.start()
        while listening.is_alive() and not self.started:
            time.sleep(0.01)
        if not self.started:
            raise RequestError(
                f"Nothing can listen at {self.config.host}:{self.config.port}: is it in use? --port names another."
            )
        on_listening(self.port)
        try:
            self._service.worker.run()
        except Exception:
            self.should_exit = True  # when those who wait have been told
            raise
        finally:
            listening.join()

    def _listen(self) -> None:
        self.run()
        if self.started:  # nobody can be answered any more
            self._service.worker.close(0)

    @property
    def port(self) -> int:
        """The port that it listens at."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port
