"""A stand-in for a CUDA stream of copies."""

from __future__ import annotations

import torch


class LazyCopyStream:
    """Copies as late as possible: without a wait the data has not arrived."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.began = False

    def wait_for_compute(self) -> None:
        self.began = True

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert self.began, "a copy must wait for the computations before it"
        assert to.is_contiguous() and source.is_contiguous() and to.shape == source.shape
        self.queue.append((to, source))

    def record_event(self) -> int:
        self.began = False
        return len(self.queue)

    def wait_event(self, event: int) -> None:
        for to, source in self.queue[self.done : event]:
            to.copy_(source)
        self.done = max(self.done, event)

    def synchronize(self) -> None:
        self.wait_event(len(self.queue))
