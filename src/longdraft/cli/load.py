"""Other processes on the cores that a run wants."""

from __future__ import annotations

import os
import time

import psutil

# Cores that others may take of a run's without a warning: a shell, a clock, the system's own work.
SLACK = 0.3


class OtherProcesses:
    """Measures how many cores other processes keep busy, from its creation on."""

    def __init__(self) -> None:
        self._start = usage()

    @property
    def cores(self) -> float:
        """Busy cores on average; 0 before the system's clock has moved."""
        elapsed, busy, own = (now - before for now, before in zip(usage(), self._start, strict=True))
        return max(0.0, busy - own) / elapsed if elapsed > 0.1 else 0.0

    @property
    def advice(self) -> str | None:
        """A sentence for the user; None if they leave as many cores as torch has threads."""
        import torch

        busy, cores, threads = self.cores, psutil.cpu_count() or 1, torch.get_num_threads()
        if busy <= cores - threads + SLACK:
            return None
        said = f"Other processes kept {busy:.1f} of {cores} cores busy beside {threads} thread"
        return f"{said}s of this run: try --threads {threads - 1}." if threads > 1 else f"{said} of this run."


def usage() -> tuple[float, float, float]:
    """The clock, work of all cores since the machine started, and work of this process, in seconds."""
    times, own = psutil.cpu_times()._asdict(), os.times()
    # Guests' seconds are counted among user's.
    busy = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    return time.perf_counter(), float(busy), own.user + own.system
