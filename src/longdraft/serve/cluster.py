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
