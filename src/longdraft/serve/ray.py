"""The server on Ray: Ray Serve starts replicas of the application, watches, scales, drains and replaces them.

Its proxy takes the requests. One with a header ``x-session-id`` goes to the replica that had the session's last one,
which has read its text already. Ray is imported only when a function here needs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from longdraft.errors import CapabilityError, RequestError
from longdraft.files import file_errors, require_regular
from longdraft.serve.app import make_app
from longdraft.serve.service import Service
from longdraft.serve.settings import ServerSettings

APP_NAME = "longdraft"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def connect() -> Any:
    """The module ``ray``, connected to the cluster that ``RAY_ADDRESS`` names or that this machine belongs to; if there
    is none, to one that lives as long as this process.

    Raises:
        CapabilityError: Ray is not installed, or the cluster does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise CapabilityError(f'This needs Ray: pip install "longdraft[ray]" ({error}).') from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray's own are of no class
            raise CapabilityError(f"Ray does not start, or its cluster does not answer: {error}.") from error
    return ray


def check_resources(ray: Any, num_processes: int, cpus: float, gpus: float) -> None:
    """Refuses processes that would wait for ever. A cluster may grow, so Ray itself reports what that lacks.

    Raises:
        CapabilityError: this machine has too few processors.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    has = ray.cluster_resources()
    for kind, each in (("CPU", cpus), ("GPU", gpus)):
        if has.get(kind, 0) < num_processes * each:
            raise CapabilityError(
                f"{num_processes} processes with {each:g} {kind} each need {num_processes * each:g}, and Ray has "
                f"{has.get(kind, 0):g}: ask for fewer, or set RAY_ADDRESS to a cluster."
            )


def error_line(message: str) -> str:
    """The last line of Ray's messages that names an error, else the last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0] and ":" in line]
    return (named or lines or ["unknown"])[-1]


def deployment_options(
    settings: ServerSettings, replicas: int, cpus: int, gpus: int, config_file: Path | None, drain_timeout: float
) -> dict[str, Any]:
    """Options of Ray's deployment.

    Args:
        replicas: how many, unless the file says, or has an ``autoscaling_config``.
        cpus, gpus: of each replica. config: a YAML or JSON file with further options, which override the others.
        drain: seconds that a replica may take to end.

    Raises:
        RequestError: the file cannot be read.
    """
    more: Any = {}
    if config_file is not None:
        import yaml

        with file_errors(config_file, f"--ray-config {config_file} cannot be read", kind=RequestError):
            more = yaml.safe_load(require_regular(config_file).read_text(encoding="utf-8"))
        if not isinstance(more, dict):
            raise RequestError(f"--ray-config {config_file} holds no options: name: value, of Ray Serve's deployment.")
    options = {
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        "max_ongoing_requests": settings.slots + settings.queue + 16,  # its own queue refuses more, with 429
        "graceful_shutdown_timeout_s": drain_timeout,
        "health_check_period_s": 5,
        "max_constructor_retry_count": 1,  # one that cannot start will not start the next time either
        "request_router_config": {"request_router_class": _ROUTER},
    }
    return {**options, **({} if "autoscaling_config" in more else {"num_replicas": replicas}), **more}


class Replica:
    """Ray's deployment: a service and its application. ``make_service`` makes the service with settings of its own."""

    def __init__(self, make_service: Callable[[ServerSettings], Service], settings: ServerSettings) -> None:
        from ray import serve

        if settings.snapshots is not None:  # no other replica has this folder
            rank = serve.get_replica_context().rank.rank
            settings = replace(settings, snapshots=settings.snapshots / str(rank))
        self._service = make_service(settings)
        self._service.worker.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self._service)

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if not self._service.worker.alive:
            raise RuntimeError("the engine thread has ended")

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.worker.close(0)


def serve(
    make_service: Callable[[ServerSettings], Service],
    settings: ServerSettings,
    options: dict[str, Any],
    host: str,
    port: int,
    on_listening: Callable[[int], None],
) -> None:
    """Serves until SIGINT or SIGTERM. Then ongoing requests are answered; a second signal ends all.

    Args:
        make_service: makes the service of a replica. options: Ray's (:func:`deployment_options`).
        on_listening: called with the port once all replicas are ready.

    Raises:
        CapabilityError: Ray is not installed, or the replicas do not start.
    """
    ray = connect()
    from ray import serve as ray_serve

    ended = threading.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):  # Ray has its own handler of the second one
        signal.signal(sig, lambda *_: ended.set())
    port = port or _free(host)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # what it starts is said here
    try:
        replica = ray_serve.deployment(ray_serve.ingress()(Replica), name="replica", **options)
        try:
            ray_serve.start(http_options={"host": host, "port": port})
            ray_serve.run(replica.bind(make_service, settings), name=APP_NAME, route_prefix="/")
        except (RuntimeError, ValueError, TimeoutError) as error:
            status = ray_serve.status().applications.get(APP_NAME)
            said = [each.message for each in status.deployments.values() if each.message] if status else []
            problem = error_line("\n".join(said) or str(error))
            raise CapabilityError(f"The replicas do not start: {problem}") from error
        on_listening(port)
        ended.wait()
        ended.clear()
    finally:
        with contextlib.suppress(Exception):  # why it ends is more than why Ray does not
            ray_serve.delete(APP_NAME, _blocking=False)
            until = time.monotonic() + options["graceful_shutdown_timeout_s"]
            while APP_NAME in ray_serve.status().applications and time.monotonic() < until and not ended.wait(0.2):
                pass  # the last answers are given
            if not ray_serve.status().applications:  # nobody else's
                ray_serve.shutdown()
        ray.shutdown()


def _free(host: str) -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port
