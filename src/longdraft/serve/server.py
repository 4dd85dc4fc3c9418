"""The server process: uvicorn with further limits on connections, and how it starts and ends with the engine."""

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

# Connections that the system may queue before they are accepted.
BACKLOG = 64


def _max_connections() -> int:
    """Half of the process's file descriptors, less those of connections that are about to open."""
    try:
        import resource

        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # on Windows
        descriptors = 512
    descriptors = 65536 if descriptors < 0 else descriptors
    return max(16, min(4096, descriptors // 2 - 2 * BACKLOG))


class LimitedConnection(H11Protocol):
    """A connection that is closed if a request's headers take too long, or, while idle, if there are too many.

    Attributes:
        header_timeout: seconds. max_connections: if there are more, the one idle for longest is closed.
    """

    header_timeout: float
    max_connections: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timer: asyncio.TimerHandle | None = None
        self._update_timer()
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            idle = [c for c in self.connections if isinstance(c, LimitedConnection) and c._timer is not None]
            oldest = min(idle, key=lambda c: c._timer.when() if c._timer else 0.0, default=self)
            oldest._cancel_timer()
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def _update_timer(self) -> None:
        """Runs the timer only while a request's headers are awaited."""
        if self.conn.their_state is not h11.IDLE:
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout, lambda: self.transport.close())

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """Drains on SIGTERM and Ctrl-C: running requests are answered, new ones get 503. A second signal ends everything.

    Args:
        drain_timeout: seconds for the running requests.
    """

    def __init__(
        self, service: Service, host: str, port: int, drain_timeout: float = 300.0, access_log: bool = False
    ) -> None:
        settings = service.settings
        max_connections = settings.connections or _max_connections()
        limits = {"header_timeout": settings.body_timeout, "max_connections": max_connections}
        config = uvicorn.Config(
            make_app(service), host=host, port=port,
            log_level="info" if access_log else "error",  # warnings about bad requests would fill the log
            access_log=access_log, timeout_keep_alive=30, http=type("Limited", (LimitedConnection,), limits), ws="none",
            backlog=BACKLOG, timeout_graceful_shutdown=10,  # requests have been answered before
        )  # fmt: skip
        if not access_log:
            logging.getLogger("asyncio").setLevel(logging.ERROR)
        super().__init__(config)
        self._service, self._drain_timeout, self._num_signals = service, drain_timeout, 0

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self.force_exit = self.should_exit = True
            return
        threading.Thread(target=self._drain, name="longdraft drain").start()

    def _drain(self) -> None:
        # The server keeps listening meanwhile, to answer new requests with 503.
        self._service.worker.close(self._drain_timeout)
        self.should_exit = True

    def run_with_engine(self, on_listening: Callable[[int], None]) -> None:
        """Serves in a new thread and decodes in this one, the main thread, until the server has ended.

        Args:
            on_listening: called with the port once the server listens.

        Raises:
            RequestError: the address cannot be used.
        """
        http_thread = threading.Thread(target=self._serve_http, name="longdraft http", daemon=True)
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self.handle_exit)
        http_thread.start()
        while http_thread.is_alive() and not self.started:
            time.sleep(0.01)
        if not self.started:
            raise RequestError(
                f"Nothing can listen at {self.config.host}:{self.config.port}: is it in use? --port names another."
            )
        on_listening(self.port)
        try:
            self._service.worker.run()
        except Exception:
            self.should_exit = True  # the clients get their errors first
            raise
        finally:
            http_thread.join()

    def _serve_http(self) -> None:
        self.run()
        if self.started:  # no answer can be sent any more
            self._service.worker.close(0)

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port
