"""A stream of copies for tests without a GPU."""

from __future__ import annotations

import torch


class LazySide:
    """In the place of a stream: copies as late as possible: without a wait, the rows are not there."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.began = False

    def begin(self) -> None:
        self.began = True

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert self.began, "a copy must wait for the computations before it"
        assert to.is_contiguous() and source.is_contiguous() and to.shape == source.shape
        self.queue.append((to, source))

    def mark(self) -> int:
        self.began = False
        return len(self.queue)

    def wait(self, mark: int) -> None:
        for to, source in self.queue[self.done : mark]:
            to.copy_(source)
        self.done = max(self.done, mark)

    def settle(self) -> None:
        self.wait(len(self.queue))
