"""Other processes on the cores that a run wants."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

# Cores that others may take of a run's without a warning: a shell, a clock, the system's own work.
SLACK = 0.3


class Usage(NamedTuple):
    """The machine at one moment, in seconds: the clock, work of all cores since it started, and work of this process.

    ``cores`` is the number of cores, ``threads`` that of torch's threads.
    """

    now: float
    busy: float
    own: float
    cores: int
    threads: int

    @classmethod
    def read(cls) -> Usage:
        import torch

        times, own = psutil.cpu_times()._asdict(), os.times()
        # Guests' seconds are counted among user's.
        busy = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        cores, threads = psutil.cpu_count() or 1, torch.get_num_threads()
        return cls(time.perf_counter(), float(busy), own.user + own.system, cores, threads)


class OtherProcesses:
    """Measures how many cores other processes keep busy, from its creation on.

    Args:
        usage: reads the machine.
    """

    def __init__(self, usage: Callable[[], Usage] = Usage.read) -> None:
        self._usage, self._start = usage, usage()

    @property
    def cores(self) -> float:
        """Busy cores on average; 0 before the system's clock has moved."""
        now, start = self._usage(), self._start
        elapsed, others = now.now - start.now, (now.busy - start.busy) - (now.own - start.own)
        return max(0.0, others) / elapsed if elapsed > 0.1 else 0.0

    @property
    def advice(self) -> str | None:
        """A sentence for the user; None if they leave as many cores as torch has threads."""
        busy, cores, threads = self.cores, self._start.cores, self._start.threads
        if busy <= cores - threads + SLACK:
            return None
        said = f"Other processes kept {busy:.1f} of {cores} cores busy beside {threads} thread"
        return f"{said}s of this run: try --threads {threads - 1}." if threads > 1 else f"{said} of this run."
