"""The server on Ray: Ray Serve starts, monitors, scales, drains and replaces replicas of the application.

Ray Serve's proxy takes the requests. A request with a header ``x-session-id`` goes to the replica that served that
session before, because the prefix is cached there. Ray is imported only when a function here needs it.
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

from longdraft.errors import CapabilityError, RequestError, needs_extra
from longdraft.files import file_errors, require_regular
from longdraft.serve.app import make_app
from longdraft.serve.service import Service
from longdraft.serve.settings import ServerSettings

APP_NAME = "longdraft"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"  # a session has one replica


def connect() -> Any:
    """Connects to the cluster at ``RAY_ADDRESS`` or on this machine, or else starts one. Returns the module ``ray``.

    Raises:
        CapabilityError: Ray is not installed, or the cluster does not answer.
    """
    with needs_extra("ray", "This needs Ray"):
        import ray
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray's exceptions have no common class
            raise CapabilityError(f"Ray does not start, or its cluster does not answer: {error}.") from error
    return ray


def check_resources(ray: Any, num_processes: int, cpus: float, gpus: float) -> None:
    """Raises CapabilityError if this machine has too few CPUs or GPUs: the processes would wait for ever.

    Args:
        cpus: number of CPUs of each process.
        gpus: number of GPUs of each process.
    """
    if os.environ.get("RAY_ADDRESS"):  # a cluster may add machines
        return
    available = ray.cluster_resources()
    for resource, count in (("CPU", cpus), ("GPU", gpus)):
        if available.get(resource, 0) < num_processes * count:
            raise CapabilityError(
                f"{num_processes} processes with {count:g} {resource} each need {num_processes * count:g}, and Ray has "
                f"{available.get(resource, 0):g}: ask for fewer, or set RAY_ADDRESS to a cluster."
            )


def error_line(message: str) -> str:
    """Returns the last line of Ray's message that names an error, or else the last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] and ":" in line]
    return (errors or lines or ["unknown"])[-1]


def deployment_options(
    settings: ServerSettings, replicas: int, cpus: int, gpus: int, config_file: Path | None, drain_timeout: float
) -> dict[str, Any]:
    """Returns options of Ray Serve's deployment.

    Args:
        replicas: number of replicas, unless the file has ``num_replicas`` or ``autoscaling_config``.
        cpus: number of CPUs of each replica.
        gpus: number of GPUs of each replica.
        config_file: YAML or JSON with further options, which override these.
        drain_timeout: seconds in which a replica must answer its last requests.

    Raises:
        RequestError: the file cannot be read.
    """
    file_options: Any = {}
    if config_file is not None:
        import yaml

        with file_errors(config_file, f"--ray-config {config_file} cannot be read", error_type=RequestError):
            file_options = yaml.safe_load(require_regular(config_file).read_text(encoding="utf-8"))
        if not isinstance(file_options, dict):
            raise RequestError(f"--ray-config {config_file} must hold options of a Ray Serve deployment (name: value).")
    options = {
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        # 16 more than a replica takes: the replica then refuses requests itself (429), and Ray does not queue them.
        "max_ongoing_requests": settings.slots + settings.queue + 16,
        "graceful_shutdown_timeout_s": drain_timeout,
        "health_check_period_s": 5,
        "max_constructor_retry_count": 1,  # a second start would fail too
        "request_router_config": {"request_router_class": _ROUTER},
    }
    return {**options, **({} if "autoscaling_config" in file_options else {"num_replicas": replicas}), **file_options}


class Replica:
    """Ray Serve's deployment class. A replica has a service and its web application."""

    def __init__(self, make_service: Callable[[ServerSettings], Service], settings: ServerSettings) -> None:
        from ray import serve

        if settings.snapshots is not None:  # only one server may use a folder of snapshots
            settings = replace(settings, snapshots=settings.snapshots / str(serve.get_replica_context().rank.rank))
        self._service = make_service(settings)
        self._service.worker.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self._service)

    def check_health(self) -> None:
        """Raises RuntimeError if the engine thread has ended. Ray then replaces the replica."""
        if not self._service.worker.alive:
            raise RuntimeError("the engine thread has ended")

    def __del__(self) -> None:  # Ray calls it when it stops the replica
        if hasattr(self, "_service"):
            self._service.worker.close(0)


def serve(
    make_service: Callable[[ServerSettings], Service], settings: ServerSettings, options: dict[str, Any], host: str,
    port: int, on_listening: Callable[[int], None],
) -> None:  # fmt: skip
    """Serves until SIGINT or SIGTERM. Running requests are then answered; a second signal ends them too.

    Args:
        make_service: makes a replica's service, in the replica's process.
        on_listening: called with the port once all replicas are ready.

    Raises:
        CapabilityError: Ray is not installed, or the replicas do not start.
    """
    ray = connect()
    from ray import serve as ray_serve

    signalled = threading.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):  # replaces Ray's handler of SIGTERM
        signal.signal(sig, lambda *_: signalled.set())
    if not port:  # Ray needs the number of a free port
        with socket.create_server((host, 0)) as probe:
            port = probe.getsockname()[1]
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # the command line reports the start
    try:
        replica = ray_serve.deployment(ray_serve.ingress()(Replica), name="replica", **options)
        try:
            ray_serve.start(http_options={"host": host, "port": port})
            ray_serve.run(replica.bind(make_service, settings), name=APP_NAME, route_prefix="/")
        except (RuntimeError, ValueError, TimeoutError) as error:
            status = ray_serve.status().applications.get(APP_NAME)
            messages = [d.message for d in status.deployments.values() if d.message] if status else []
            problem = error_line("\n".join(messages) or str(error))
            raise CapabilityError(f"The replicas do not start: {problem}") from error
        on_listening(port)
        signalled.wait()
        signalled.clear()
    finally:
        with contextlib.suppress(Exception):  # an error of the clean-up must not hide the first one
            ray_serve.delete(APP_NAME, _blocking=False)
            deadline = time.monotonic() + options["graceful_shutdown_timeout_s"]
            while APP_NAME in ray_serve.status().applications:  # until the last requests are answered
                if time.monotonic() >= deadline or signalled.wait(0.2):
                    break
            if not ray_serve.status().applications:  # the cluster serves no other application
                ray_serve.shutdown()
        ray.shutdown()
