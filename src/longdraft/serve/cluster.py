"""Connecting to Ray, an optional package, and sharing its resources."""

from __future__ import annotations

import os
from typing import Any

from longdraft.errors import CapabilityError


def connected() -> Any:
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
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise CapabilityError(f"Ray does not start, or its cluster does not answer: {error}.") from error
    return ray


def share(processes: int, gpu: bool) -> int:
    """Cores of this machine for each process; one if a GPU does the work."""
    return 1 if gpu else max(1, (os.cpu_count() or 1) // processes)


def require(ray: Any, processes: int, cpus: float, gpus: float) -> None:
    """Refuses processes that would wait for ever. A cluster may grow, so Ray itself reports what that lacks.

    Raises:
        CapabilityError: this machine has too few processors.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    has = ray.cluster_resources()
    for kind, each in (("CPU", cpus), ("GPU", gpus)):
        if has.get(kind, 0) < processes * each:
            raise CapabilityError(
                f"{processes} processes with {each:g} {kind} each need {processes * each:g}, and Ray has "
                f"{has.get(kind, 0):g}: ask for fewer, or set RAY_ADDRESS to a cluster."
            )


def reason(message: str) -> str:
    """The last line of Ray's messages that names an error, else the last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0] and ":" in line]
    return (named or lines or ["unknown"])[-1]
