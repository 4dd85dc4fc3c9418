"""Replicas of the server on Ray: Ray Serve starts, watches, scales and replaces them.

There are two deployments. The front takes requests from Ray's HTTP proxies and hands each to a replica of the model, by
consistent hashing of the beginning of its text, so that the replica has read that beginning already. Ray is imported
only when a function here needs it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from longdraft.errors import CapabilityError, RequestError
from longdraft.files import regular
from longdraft.serve.app import make_app
from longdraft.serve.cluster import connected, reason, require, share
from longdraft.serve.guards import Guards
from longdraft.serve.relay import METRICS, Forwarded, Lost, Relay, answer
from longdraft.serve.service import Service
from longdraft.serve.settings import Settings
from longdraft.serve.worker import QueueFull

NAME = "longdraft"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@dataclass(frozen=True)
class Fleet:
    """The number of replicas, and the processors of each.

    Attributes:
        least, most: replicas; Ray scales between the two by the requests that each has.
        cpus, gpus: how many Ray reserves for each replica.
        more: further options of Ray's deployment; they override the others.
    """

    least: int = 1
    most: int = 1
    cpus: int = 1
    gpus: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)

    def options(self, slots: int, queue: int, drain: float) -> dict[str, Any]:
        """Options of the replicas' deployment.

        Args:
            slots: requests that a replica decodes at a time. queue: requests that may wait.
            drain: seconds that a replica may take to end.
        """
        options: dict[str, Any] = {
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            # As many wait in the replica as it decodes. Others wait in the front, where they outlive the replica.
            "max_ongoing_requests": 2 * slots,
            "max_queued_requests": queue,
            "graceful_shutdown_timeout_s": drain,
            "health_check_period_s": 5,
            # A replica that cannot start will not start the next time either.
            "max_constructor_retry_count": 1,
            "request_router_config": {"request_router_class": _ROUTER},
        }
        if not {"num_replicas", "autoscaling_config"} & self.more.keys():
            if self.most == self.least:
                options["num_replicas"] = self.least
            else:
                options["autoscaling_config"] = {
                    "min_replicas": self.least, "max_replicas": self.most, "target_ongoing_requests": slots,
                }  # fmt: skip
        return {**options, **self.more}


def fleet(replicas: str, config: Path | None, gpu: bool, threads: int | None) -> Fleet:
    """The fleet that the command's options describe.

    Args:
        replicas: ``"2"``, or ``"1-4"`` to scale. config: YAML or JSON file with options of Ray's deployment.
        gpu: each replica has one. threads: of each; None: its share of this machine's cores, or one if it has a GPU.

    Raises:
        RequestError: ``replicas`` is malformed, or the file cannot be read.
    """
    low, dash, high = replicas.partition("-")
    try:
        least, most = int(low), int(high) if dash else int(low)
    except ValueError:
        least, most = 0, 0
    if not (0 <= least <= most and most >= 1 and (dash or least)):
        raise RequestError(f"--replicas takes a number, or two such as 1-4 to scale between, not {replicas!r}.")
    more: Any = {}
    if config is not None:
        import yaml

        try:
            more = yaml.safe_load(regular(config).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RequestError(f"--ray-config {config}: {error}.") from error
        if not isinstance(more, dict):
            raise RequestError(f"--ray-config {config} holds no options: name: value, of Ray Serve's deployment.")
    return Fleet(least, most, threads or share(most, gpu), int(gpu), more)


class Replica:
    """Ray's deployment of the model: its service and application. ``make`` makes the service."""

    def __init__(self, make: Callable[[], Service]) -> None:
        self._service = make()
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._app = make_app(self._service)
        self._service.worker.start()

    async def answer(self, request: Forwarded) -> AsyncIterator[Message]:
        async for message in answer(self._app, request):
            yield message
        page = self._service.metrics.page().decode()
        yield {"type": METRICS, "replica": self._name, "made": time.monotonic(), "page": page}

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if not self._service.worker.alive:
            raise RuntimeError("the engine thread has ended")

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.worker.close(0)


class Front:
    """Ray's deployment that takes requests from its proxies.

    Args:
        replicas: Ray's handle of their deployment. settings: the limits of requests.
        from_none: Ray starts the first replica when the first request comes.
    """

    def __init__(self, replicas: Any, settings: Settings, from_none: bool) -> None:
        self._replicas = replicas.options(stream=True)
        self._settings = settings
        self._relay = Relay(self._ask, None if from_none else _some_run)
        self._app = Guards(self._relay, settings)

    async def __call__(self, request: Request) -> Response:
        return _Relayed(self._app)

    def drain(self) -> int:
        """Refuses new requests from now on. Returns how many are still being answered."""
        self._relay.draining = True
        return self._relay.ongoing

    async def _ask(self, request: Forwarded) -> AsyncIterator[Message]:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError

        handle = self._replicas.options(session_id=request.key) if request.key else self._replicas
        messages = handle.answer.remote(request)
        try:
            async for message in messages:
                yield message
        except (RayActorError, ReplicaUnavailableError) as error:
            raise Lost from error
        except BackPressureError as error:
            raise QueueFull(self._settings.queue, 5.0) from error
        finally:
            messages.cancel()


class _Relayed(Response):
    """A response that an ASGI application writes. Ray calls what a deployment returns if it is a Response."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Any]) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def serve(
    make: Callable[[], Service],
    settings: Settings,
    fleet: Fleet,
    host: str,
    port: int,
    listens: Callable[[int], None],
    drain: float = 300.0,
) -> None:
    """Serves until SIGINT or SIGTERM. Then ongoing requests are answered, and new ones get 503.

    Args:
        make: makes the service of a replica. settings: the limits of requests.
        listens: called with the port once all replicas are ready. drain: seconds that the last answers may take.

    Raises:
        CapabilityError: Ray is not installed, or the replicas do not start.
    """
    ray = connected()
    if not fleet.more:
        require(ray, fleet.least, fleet.cpus, fleet.gpus)
    from ray import serve as ray_serve

    ended = threading.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):  # Ray has its own handler of the second one
        signal.signal(sig, lambda *_: ended.set())
    port = port or _free(host)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # what it starts is said here
    try:
        ray_serve.start(http_options={"host": host, "port": port})
        replicas = ray_serve.deployment(Replica, name="replica", **fleet.options(settings.slots, settings.queue, drain))
        front = ray_serve.deployment(
            Front, name="front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100_000,
            graceful_shutdown_timeout_s=5,
        )  # fmt: skip
        try:
            bound = front.bind(replicas.bind(make), settings, fleet.least == 0)
            handle = ray_serve.run(bound, name=NAME, route_prefix="/")
        except (RuntimeError, ValueError) as error:
            raise CapabilityError(f"The replicas do not start: {_failure(ray_serve, error)}") from error
        listens(port)
        ended.wait()
        ended.clear()
        until = time.monotonic() + drain
        while handle.drain.remote().result() and time.monotonic() < until and not ended.wait(0.2):
            pass
    finally:
        _end(ray_serve)
        ray.shutdown()


async def _some_run() -> bool:
    """True once a replica has read the model."""
    from ray import serve as ray_serve

    application = (await asyncio.to_thread(ray_serve.status)).applications.get(NAME)
    replicas = None if application is None else application.deployments.get("replica")
    return replicas is not None and replicas.replica_states.get("RUNNING", 0) > 0


def _end(ray_serve: Any) -> None:
    """Ends our application, and Ray Serve itself if it runs no other."""
    if set(ray_serve.status().applications) - {NAME}:
        ray_serve.delete(NAME)
    else:
        ray_serve.shutdown()


def _failure(ray_serve: Any, error: Exception) -> str:
    """Why a deployment did not start: the error in its replicas' traceback."""
    status = ray_serve.status().applications.get(NAME)
    messages = [] if status is None else [each.message for each in status.deployments.values() if each.message]
    return reason("\n".join(messages) or str(error))


def _free(host: str) -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port
