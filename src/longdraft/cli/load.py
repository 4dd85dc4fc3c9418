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
        times, own = psutil.cpu_times()._asdict(), os.times()
        # Guests' seconds are counted among user's.
        busy = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        import torch

        threads = torch.get_num_threads()
        return cls(time.perf_counter(), float(busy), own.user + own.system, psutil.cpu_count() or 1, threads)


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
        return self._cores(self._usage())

    def _cores(self, usage: Usage) -> float:
        elapsed = usage.now - self._start.now
        others = (usage.busy - self._start.busy) - (usage.own - self._start.own)
        return max(0.0, others) / elapsed if elapsed > 0.1 else 0.0

    @property
    def in_the_way(self) -> bool:
        """True if they leave fewer cores than torch has threads."""
        usage = self._usage()
        return self._cores(usage) > usage.cores - usage.threads + SLACK

    @property
    def advice(self) -> str | None:
        """A sentence for the user; None if they are not in the way."""
        if not self.in_the_way:
            return None
        usage = self._usage()
        threads, cores = usage.threads, f"{self._cores(usage):.1f} of {usage.cores} cores"
        sentence = f"Other processes kept {cores} busy beside {threads} thread{'s' if threads > 1 else ''} of this run"
        return f"{sentence}: try --threads {threads - 1}." if threads > 1 else f"{sentence}."
