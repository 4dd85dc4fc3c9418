"""RoundProfiler: time spent in the phases of a round. A runner has one only while it is profiled."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from longdraft.attention.forward_batch import ForwardBatch

Phase = Literal["draft", "forward", "attention", "commit"]
"""Drafting; verification; the target's attention in verification or prefill; committing accepted tokens."""


class RoundProfiler:
    """Seconds in each phase since the last :meth:`pop_counts`. Time in a nested phase counts in the inner one only.

    It waits for the device at each measurement, which slows a GPU down: only the proportions are meaningful there.

    Attributes:
        counts: seconds by phase; ``keys`` that attention read, and ``prefix keys`` among them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: list[Phase] = []
        self.counts: dict[str, float] = defaultdict(float)

    def pop_counts(self) -> dict[str, float]:
        counts, self.counts = self.counts, defaultdict(float)
        return counts

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        outer, start = self._phases[-1] if self._phases else None, self._now()
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()
            seconds = self._now() - start
            self.counts[phase] += seconds
            if outer is not None:
                self.counts[outer] -= seconds

    def profiled_attention(self, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Attention that is timed in verification and prefill. A drafter's attention counts as its ``draft`` phase."""

        def timed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, *args: Any) -> torch.Tensor:
            if self._phases[-1:] != ["forward"] and (self._phases or not batch.is_prefill):
                return attend(q, k, v, batch, *args)
            self.counts["prefix keys"] += sum(batch.prefix_lens)
            self.counts["keys"] += sum(batch.prefix_lens) + batch.batch_size * batch.tree_len
            with self("attention"):
                return attend(q, k, v, batch, *args)

        return timed

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


_NO_PROFILE = nullcontext()


def profiled(profiler: RoundProfiler | None, phase: Phase) -> AbstractContextManager[None]:
    """Times a phase inside the ``with``; does nothing without a profiler."""
    return _NO_PROFILE if profiler is None else profiler(phase)
