"""The documents of each batch: a function of seed and epoch alone, so that a resumed run sees the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """Indices of packed documents, and the shift j of each (flash noisy training)."""

    documents: tuple[int, ...]
    shifts: tuple[int, ...]


def epoch_batches(rows: Sequence[int], token_limit: int, noise: int, seed: int, epoch: int) -> list[Batch]:
    """The batches of one epoch, in order. Every document is in one of them.

    Args:
        rows: learned tokens of each document.
        token_limit: learned tokens of a batch; a batch is closed when one more document would exceed it.
        noise: shifts are uniform in 1 .. noise.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(rows)))
    rng.shuffle(order)
    batches: list[Batch] = []
    current: list[int] = []
    filled = 0

    def close() -> None:
        batches.append(Batch(tuple(current), tuple(rng.randint(1, noise) for _ in current)))

    for i in order:
        if current and filled + rows[i] > token_limit:
            close()
            current, filled = [], 0
        current.append(i)
        filled += rows[i]
    if current:
        close()
    return batches


class Schedule:
    """The batches of each step: a group of ``processes * accumulate``.

    An incomplete last group of an epoch is left out; the next epoch's shuffle puts other documents into it. If an epoch
    makes no complete group, its one step takes as many batches as all processes can have alike, so that none waits for
    the others; :meth:`at` then returns no batch if there are fewer batches than processes.

    Args:
        rows, token_limit, noise, seed: see :func:`epoch_batches`.
        epochs: a fraction stops part of the way through the last one.
        max_steps: ends earlier; None: with the epochs.
    """

    def __init__(
        self,
        rows: Sequence[int],
        token_limit: int,
        noise: int,
        seed: int,
        epochs: float,
        processes: int = 1,
        accumulate: int = 1,
        max_steps: int | None = None,
    ) -> None:
        self._make = lambda epoch: epoch_batches(rows, token_limit, noise, seed, epoch)
        self._processes = processes
        self.width = processes * accumulate
        self._epochs: dict[int, list[Batch]] = {}
        begun = int(epochs) + (epochs % 1 > 0)
        self.counts = [max(1, len(self._make(epoch)) // self.width) for epoch in range(begun)]
        """Steps of each epoch."""
        if epochs % 1:
            self.counts[-1] = max(1, int(self.counts[-1] * (epochs % 1)))

        self.steps = min(sum(self.counts), max_steps or sum(self.counts))

    def at(self, step: int) -> list[Batch]:
        """The batches of one step. Process i takes every n-th of them from the i-th on."""
        epoch = 0
        while step >= self.counts[epoch]:
            step -= self.counts[epoch]
            epoch += 1
        if epoch not in self._epochs:
            self._epochs = {epoch: self._make(epoch)}
        group = self._epochs[epoch][step * self.width : (step + 1) * self.width]
        return group[: len(group) // self._processes * self._processes]
