"""The server process: uvicorn with limits on connections; starts and ends together with the engine thread."""

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

BACKLOG = 64  # connections that the operating system may queue before they are accepted


def _max_connections() -> int:
    """Returns how many connections may be open: half of the file descriptors (files need the rest), but 16 to 4096."""
    try:
        import resource

        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # on Windows
        descriptors = 512  # the C library's default
    descriptors = 65536 if descriptors < 0 else descriptors  # -1: no limit
    return max(16, min(4096, descriptors // 2 - 2 * BACKLOG))  # the backlog's connections have descriptors too


class LimitedConnection(H11Protocol):
    """A connection that is closed if a request's headers take too long, or if it is idle and there are too many."""

    header_timeout: float  # seconds
    max_connections: int  # if there are more, the connection that has been idle for longest is closed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timer: asyncio.TimerHandle | None = None  # runs while the connection is idle
        self._update_timer()
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:  # connections: uvicorn's set of all open connections
            idle = [c for c in self.connections if isinstance(c, LimitedConnection) and c._timer is not None]
            # The timer that will end first belongs to the connection that has been idle for longest.
            longest_idle = min(idle, key=lambda c: c._timer.when() if c._timer else 0.0, default=self)
            longest_idle._cancel_timer()
            longest_idle.transport.abort()

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
        """Starts the timer while the next request's headers have not arrived; stops it otherwise."""
        if self.conn.their_state is not h11.IDLE:  # conn: h11's state, set by H11Protocol
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout, lambda: self.transport.close())

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """A uvicorn server. SIGTERM or Ctrl-C drains it: running requests are answered, new ones get 503. A second ends it.

    Args:
        port: the port to listen on; 0: any free port.
        drain_timeout: seconds after which running requests fail.
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
            # uvicorn makes connections from the class alone, so the limits are attributes of a subclass.
            access_log=access_log, timeout_keep_alive=30, http=type("Limited", (LimitedConnection,), limits), ws="none",
            backlog=BACKLOG, timeout_graceful_shutdown=10,  # seconds; _drain has waited for the requests
        )  # fmt: skip
        if not access_log:
            logging.getLogger("asyncio").setLevel(logging.ERROR)
        super().__init__(config)
        self._service, self._drain_timeout, self._num_signals = service, drain_timeout, 0

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self.force_exit = self.should_exit = True  # uvicorn then ends without waiting for responses
            return
        threading.Thread(target=self._drain, name="longdraft drain").start()

    def _drain(self) -> None:
        """Ends the worker, then the server, which until then answers new requests with 503."""
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
        while http_thread.is_alive() and not self.started:  # started: set by uvicorn once it listens
            time.sleep(0.01)
        if not self.started:
            raise RequestError(
                f"The server cannot listen at {self.config.host}:{self.config.port}. If it is in use, set --port."
            )
        on_listening(self.port)
        try:
            self._service.worker.run()
        except Exception:
            self.should_exit = True  # uvicorn still sends the errors to the clients
            raise
        finally:
            http_thread.join()

    def _serve_http(self) -> None:
        self.run()
        if self.started:  # the HTTP server has ended, so no answer can be sent
            self._service.worker.close(0)

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port
