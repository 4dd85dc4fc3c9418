"""Clocks around the parts of a round, for profiles. A runner has one only while it is profiled."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from longdraft.attention.forward_batch import ForwardBatch

Phase = Literal["draft", "forward", "attention", "commit"]
"""The drafter; the verification; the target's attention in it or in reading a prompt; keeping what was accepted."""


class RoundProfiler:
    """Seconds inside parts since the last :meth:`pop_counts`. Those of a part inside another count once, in the inner one.

    It waits for the device whenever it is read, which costs a GPU its head start: only proportions count there.

    Attributes:
        counts: seconds by part; ``keys`` that attention read, and ``prefix keys`` among them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inside: list[Phase] = []
        self.counts: dict[str, float] = defaultdict(float)

    def pop_counts(self) -> dict[str, float]:
        taken, self.counts = self.counts, defaultdict(float)
        return taken

    @contextmanager
    def __call__(self, part: Phase) -> Iterator[None]:
        outer, start = self._inside[-1] if self._inside else None, self._now()
        self._inside.append(part)
        try:
            yield
        finally:
            self._inside.pop()
            seconds = self._now() - start
            self.counts[part] += seconds
            if outer is not None:
                self.counts[outer] -= seconds

    def profiled_attention(self, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Attention whose time is taken, in verifications and prompts: a drafter's or a refresh's is part of theirs."""

        def timed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: ForwardBatch, *more: Any) -> torch.Tensor:
            if self._inside[-1:] != ["forward"] and (self._inside or not block.is_prefill):
                return attend(q, k, v, block, *more)
            self.counts["prefix keys"] += sum(block.prefix_lens)
            self.counts["keys"] += sum(block.prefix_lens) + block.batch_size * block.tree_len
            with self("attention"):
                return attend(q, k, v, block, *more)

        return timed

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


_NOTHING = nullcontext()


def profiled(profiler: RoundProfiler | None, phase: Phase) -> AbstractContextManager[None]:
    """The clock on a part; nothing where there is none."""
    return _NOTHING if profiler is None else profiler(phase)
