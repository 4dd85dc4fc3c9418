"""The server process: uvicorn and the worker, and how they start and end together."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from longdraft.errors import RequestError
from longdraft.serve.app import make_app
from longdraft.serve.connections import BACKLOG, Connection, bound_logs
from longdraft.serve.service import Service


class Server(uvicorn.Server):
    """Drains on SIGTERM and Ctrl-C: ongoing requests are answered, new ones get 503. A second signal ends everything.

    Args:
        drain: seconds that the last answers may take.
    """

    def __init__(self, service: Service, host: str, port: int, drain: float = 300.0, access_log: bool = False) -> None:
        config = uvicorn.Config(
            make_app(service), host=host, port=port, log_level="warning", access_log=access_log, timeout_keep_alive=30,
            http=Connection.limited(service.settings.body_seconds), ws="none", backlog=BACKLOG,
            timeout_graceful_shutdown=10,  # all has been answered by then
        )  # fmt: skip
        bound_logs()
        super().__init__(config)
        self._service, self._drain = service, drain
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

    def serve_beside(self, listens: Callable[[int], None]) -> None:
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
        listens(self.port)
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
