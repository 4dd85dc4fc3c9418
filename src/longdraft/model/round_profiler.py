"""RoundProfiler times the phases of a decoding round. A runner has one only while a benchmark profiles it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from longdraft.attention.forward_batch import ForwardBatch

Phase = Literal["draft", "update", "forward", "attention", "commit"]
"""Drafting; updating the draft's cache (choosing and gathering entries); the target's verification; the target's
attention, in verification and prefill; committing tokens."""


class RoundProfiler:
    """Sums up the seconds of each phase. The time of a nested phase does not count in the outer phase.

    Each measurement waits for the device, which slows a GPU down: there, only the proportions are meaningful.

    Attributes:
        counts: phase -> seconds; "keys" -> number of keys that attention read; "prefix keys" -> number of these that
            were committed. :meth:`pop_counts` starts new counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: list[Phase] = []
        self.counts: dict[str, float] = defaultdict(float)

    def pop_counts(self) -> dict[str, float]:
        """Returns the counts and starts new ones."""
        counts, self.counts = self.counts, defaultdict(float)
        return counts

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Times what runs inside the ``with`` as this phase."""
        outer_phase, start = self._phases[-1] if self._phases else None, self._now()
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()
            seconds = self._now() - start
            self.counts[phase] += seconds
            if outer_phase is not None:
                self.counts[outer_phase] -= seconds

    def profiled_attention(self, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wraps attention to time it in verification and prefill. A draft's attention counts as the phase "draft"."""

        def timed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, *args: Any) -> torch.Tensor:
            is_prefill = not self._phases and batch.is_prefill  # the target's prefill is outside of all phases
            if self._phases[-1:] != ["forward"] and not is_prefill:
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
    """Returns a context manager that times a phase. Without a profiler it does nothing."""
    return _NO_PROFILE if profiler is None else profiler(phase)
