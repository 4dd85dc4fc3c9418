"""The documents of each batch: a function of seed and epoch alone, so that a resumed run sees the same."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from longdraft.training.lazy import Lazy


@dataclass(frozen=True)
class Batch:
    """Indices of packed documents, and the shift j of each (flash noisy training)."""

    documents: tuple[int, ...]
    shifts: tuple[int, ...]


class Epoch(Lazy[Batch]):
    """The batches of one epoch, in order. Every document is in one of them, and takes 8 bytes here.

    Args:
        rows: learned tokens of each document.
        token_limit: learned tokens of a batch; a batch is closed when one more document would exceed it.
        noise: shifts are uniform in 1 .. noise.
    """

    def __init__(self, rows: Sequence[int], token_limit: int, noise: int, seed: int, epoch: int) -> None:
        rng = random.Random(f"{seed}/{epoch}")
        self._order = array("i", range(len(rows)))
        rng.shuffle(self._order)
        self._ends = array("i")  # of each batch, in that order
        filled = 0
        for place, i in enumerate(self._order):
            if place and filled + rows[i] > token_limit:
                self._ends.append(place)
                filled = 0
            filled += rows[i]
        self._ends.append(len(rows))
        self._shifts = array("i", (rng.randint(1, noise) for _ in rows))

    def __len__(self) -> int:
        return len(self._ends)

    def item(self, i: int) -> Batch:
        places = slice(self._ends[i - 1] if i else 0, self._ends[i])
        return Batch(tuple(self._order[places]), tuple(self._shifts[places]))


class Schedule:
    """The batches of each step: a group of ``processes * accumulate``.

    An incomplete last group of an epoch is left out; the next epoch's shuffle puts other documents into it. If an epoch
    makes no complete group, its one step takes as many batches as all processes can have alike, so that none waits for
    the others; :meth:`at` then returns no batch if there are fewer batches than processes.

    Args:
        rows, token_limit, noise, seed: see :class:`Epoch`.
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
        self._make = lambda epoch: Epoch(rows, token_limit, noise, seed, epoch)
        self._processes = processes
        self.width = processes * accumulate
        self._epochs: dict[int, Epoch] = {}
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
