"""Other processes on the cores that a run wants."""

from __future__ import annotations

import os
import time

import psutil
import torch

# Cores that others may take of a run's without a warning: a shell, a clock, the system's own work.
SLACK = 0.3


class OtherProcesses:
    """Measures how many cores other processes keep busy, from its creation on."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), _busy(), _own()

    @property
    def cores(self) -> float:
        """Busy cores on average; 0 before the system's clock has moved."""
        elapsed = time.perf_counter() - self._start
        return max(0.0, (_busy() - self._busy) - (_own() - self._own)) / elapsed if elapsed > 0.1 else 0.0

    @property
    def in_the_way(self) -> bool:
        """True if they leave fewer cores than torch has threads."""
        return self.cores > (psutil.cpu_count() or 1) - torch.get_num_threads() + SLACK

    @property
    def advice(self) -> str | None:
        """A sentence for the user; None if they are not in the way."""
        if not self.in_the_way:
            return None
        threads = torch.get_num_threads()
        cores = f"{self.cores:.1f} of {psutil.cpu_count()} cores"
        sentence = f"Other processes kept {cores} busy beside {threads} threads of this run"
        return f"{sentence}: try --threads {threads - 1}." if threads > 1 else f"{sentence}."


def _busy() -> float:
    """Seconds that all cores have worked since the machine started."""
    times = psutil.cpu_times()._asdict()
    # Guests' seconds are counted among user's.
    return float(sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


def _own() -> float:
    times = os.times()
    return times.user + times.system
