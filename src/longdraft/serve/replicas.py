"""Replicas of the server on Ray: Ray Serve starts, watches, scales and replaces them.

Two deployments: the front takes requests off Ray's HTTP proxies, and hands each to a replica of the model by
consistent hashing of how its text begins, so that the replica has read that beginning already. Ray is imported when
it is asked for.
"""

from __future__ import annotations

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
from longdraft.serve.app import make_app
from longdraft.serve.cluster import connected, require, share
from longdraft.serve.guards import Guards
from longdraft.serve.relay import Asked, Lost, Relay, answer
from longdraft.serve.service import Service
from longdraft.serve.settings import Settings
from longdraft.serve.worker import Full

NAME = "longdraft"
# Seconds after its timeout that a request may take to come back.
_GRACE = 30.0
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@dataclass(frozen=True)
class Fleet:
    """How many replicas there are, and what each takes.

    Attributes:
        least, most: replicas; Ray scales between the two by the requests that each has.
        cpus, gpus: that Ray reserves for each.
        more: further options of Ray's deployment, which go before these.
    """

    least: int = 1
    most: int = 1
    cpus: int = 1
    gpus: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)

    def options(self, slots: int, queue: int, drain: float) -> dict[str, Any]:
        """Of the replicas' deployment, each of which decodes so many requests at a time."""
        found: dict[str, Any] = {
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            # As many as are decoded, and as many that wait beside them; others wait in the front, and are lost with no
            # replica.
            "max_ongoing_requests": 2 * slots,
            "max_queued_requests": queue,
            "graceful_shutdown_timeout_s": drain,
            "health_check_period_s": 5,
            # What a replica cannot be started with, it cannot be started with the next time either.
            "max_constructor_retry_count": 1,
            "request_router_config": {"request_router_class": _ROUTER},
        }
        if self.most > self.least:
            found["autoscaling_config"] = {
                "min_replicas": self.least, "max_replicas": self.most, "target_ongoing_requests": slots,
            }  # fmt: skip
        else:
            found["num_replicas"] = self.least
        if {"num_replicas", "autoscaling_config"} & self.more.keys():
            found = {k: v for k, v in found.items() if k not in ("num_replicas", "autoscaling_config")}
        return {**found, **self.more}


def fleet(replicas: str, config: Path | None, gpu: bool, threads: int | None) -> Fleet:
    """From what is asked for: ``"2"``, or ``"1-4"``, and a YAML or JSON file of options of Ray's deployment.

    Args:
        gpu: each has one. threads: of each; None: its share of this machine's cores, of which one with a GPU needs one.

    Raises:
        RequestError: neither a number nor two, or a file that cannot be read.
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
            more = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RequestError(f"--ray-config {config}: {error}.") from error
        if not isinstance(more, dict):
            raise RequestError(f"--ray-config {config} holds no options: name: value, of Ray Serve's deployment.")
    return Fleet(least, most, threads or share(most, gpu), int(gpu), more)


class Replica:
    """The model, its engine thread, and the whole application.

    Args:
        make: makes the service, where the replica runs.
    """

    def __init__(self, make: Callable[[], Service]) -> None:
        self._service = make()
        self._app = make_app(self._service)
        self._service.worker.start()

    async def answer(self, asked: Asked) -> AsyncIterator[Message]:
        async for message in answer(self._app, asked):
            yield message

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if not self._service.worker.alive:
            raise RuntimeError("the engine thread has ended")

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.worker.close(0)


class Front:
    """Takes requests off Ray's proxies.

    Args:
        replicas: handle of their deployment. settings: those of the service that say what a request may be.
    """

    def __init__(self, replicas: Any, settings: Settings) -> None:
        self._replicas = replicas.options(stream=True)
        self._settings = settings
        self._relay = Relay(self._ask)
        self._app = Guards(self._relay, settings.keys, settings.max_body, settings.body_seconds)

    async def __call__(self, request: Request) -> Response:
        return _Relayed(self._app)

    def drain(self) -> int:
        """No more requests are taken; how many are still to be answered."""
        self._relay.draining = True
        return self._relay.ongoing

    async def _ask(self, asked: Asked) -> AsyncIterator[Message]:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError

        handle = self._replicas.options(session_id=asked.key) if asked.key else self._replicas
        messages = handle.answer.remote(asked)
        try:
            async for message in messages:
                yield message
        except (RayActorError, ReplicaUnavailableError) as error:
            raise Lost from error
        except BackPressureError as error:
            raise Full(self._settings.queue, 5.0) from error
        finally:
            messages.cancel()


class _Relayed(Response):
    """A response that an ASGI application makes: Ray calls what it is handed, if it is a response."""

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
    """Serves until SIGINT or SIGTERM; then what runs and waits is answered, and new requests get 503.

    Args:
        make: makes a replica's service. settings: those of the service that say what a request may be.
        listens: told the port, once all replicas are there. drain: seconds that the last answers may take.

    Raises:
        CapabilityError: Ray is not there, or the replicas do not start; says why.
    """
    ray = connected()
    if not fleet.more:
        require(ray, fleet.least, fleet.cpus, fleet.gpus)
    from ray import serve as ray_serve

    ended = threading.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):  # Ray has taken the second one
        signal.signal(sig, lambda *_: ended.set())
    port = port or _free(host)
    try:
        ray_serve.start(http_options={"host": host, "port": port})
        replicas = ray_serve.deployment(Replica, name="replica", **fleet.options(settings.slots, settings.queue, drain))
        front = ray_serve.deployment(
            Front, name="front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100_000,
            graceful_shutdown_timeout_s=5,
        )  # fmt: skip
        try:
            handle = ray_serve.run(front.bind(replicas.bind(make), settings), name=NAME, route_prefix="/")
        except (RuntimeError, ValueError) as error:
            raise CapabilityError(f"The replicas do not start: {_reason(ray_serve, error)}") from error
        listens(port)
        ended.wait()
        ended.clear()
        until = time.monotonic() + drain
        while handle.drain.remote().result() and time.monotonic() < until and not ended.wait(0.2):
            pass
    finally:
        _end(ray_serve)
        ray.shutdown()


def _end(ray_serve: Any) -> None:
    """Ends what was begun, and Ray Serve itself where no other application runs on it."""
    if set(ray_serve.status().applications) - {NAME}:
        ray_serve.delete(NAME)
    else:
        ray_serve.shutdown()


def _reason(ray_serve: Any, error: Exception) -> str:
    """What Ray knows of a deployment that did not start: the last line of its replicas' traceback."""
    status = ray_serve.status().applications.get(NAME)
    said = [d.message for d in status.deployments.values() if d.message] if status is not None else []
    lines = [line.strip() for text in said or [str(error)] for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return (named or lines or [type(error).__name__])[-1]


def _free(host: str) -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
    return port
