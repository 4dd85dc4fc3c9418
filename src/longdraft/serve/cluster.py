"""Ray, where it is asked for: an extra, which nothing else imports."""

from __future__ import annotations

import os
from typing import Any

from longdraft.errors import CapabilityError


def connected() -> Any:
    """The module ``ray``, connected to the cluster that ``RAY_ADDRESS`` names or that this machine is part of; else
    to one that begins here and ends with this process.

    Raises:
        CapabilityError: Ray is not there, or the cluster does not answer.
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
    """Cores for each of so many processes: of this machine; one where a GPU does the work."""
    return 1 if gpu else max(1, (os.cpu_count() or 1) // processes)


def require(ray: Any, processes: int, cpus: float, gpus: float) -> None:
    """Refuses what would wait for ever. A cluster elsewhere may grow: of that Ray itself says what it lacks.

    Raises:
        CapabilityError: this machine has not got so many.
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
