"""The documents of each batch: a function of seed and epoch alone, so that a resumed run sees the same."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple


class Batch(NamedTuple):
    """Numbers of packed documents, the shift j of each (flash noisy training), and the epoch from 0 on."""

    documents: tuple[int, ...]
    shifts: tuple[int, ...]
    epoch: int = 0


class Epoch(NamedTuple):
    """An epoch's documents in their order, the shift of each, and where each batch ends among them."""

    order: array[int]
    shifts: array[int]
    ends: array[int]


def laid_out(rows: Sequence[int], token_limit: int, noise: int, seed: int, epoch: int) -> Epoch:
    """The batches of an epoch: every document is in one of them, and takes 8 bytes here.

    Args:
        rows: learned tokens of each document.
        token_limit: learned tokens of a batch; a batch is closed when one more document would exceed it.
        noise: shifts are uniform in 1 .. noise.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = array("i", range(len(rows)))
    rng.shuffle(order)
    ends, filled = array("i"), 0
    for place, i in enumerate(order):
        if place and filled + rows[i] > token_limit:
            ends.append(place)
            filled = 0
        filled += rows[i]
    ends.append(len(rows))
    return Epoch(order, array("i", (rng.randint(1, noise) for _ in rows)), ends)


class Schedule:
    """The batches of each step: a group of ``processes * accumulate``.

    An incomplete last group of an epoch is left out; the next epoch's shuffle puts other documents into it. If an epoch
    makes no complete group, its one step takes as many batches as all processes can have alike, so that none waits for
    the others; :meth:`at` then returns no batch if there are fewer batches than processes.

    Args:
        rows, token_limit, noise, seed: see :func:`laid_out`.
        epochs: a fraction stops part of the way through the last one.
        max_steps: ends earlier; None: with the epochs.

    Attributes:
        counts: steps of each epoch. steps: of all. width: batches of a step.
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
        self._epoch = lru_cache(1)(partial(laid_out, rows, token_limit, noise, seed))
        self._processes, self.width = processes, processes * accumulate
        self.counts = [max(1, len(self._epoch(i).ends) // self.width) for i in range(math.ceil(epochs))]
        if epochs % 1:
            self.counts[-1] = max(1, int(self.counts[-1] * (epochs % 1)))
        self.steps = min(sum(self.counts), max_steps or sum(self.counts))

    def at(self, step: int) -> list[Batch]:
        """The batches of one step. Process i takes every n-th of them from the i-th on."""
        number = 0
        while step >= self.counts[number]:
            step -= self.counts[number]
            number += 1
        order, shifts, ends = self._epoch(number)
        first = step * self.width
        group = range(first, min(first + self.width, len(ends)))
        places = [
            slice(ends[i - 1] if i else 0, ends[i]) for i in group[: len(group) // self._processes * self._processes]
        ]
        return [Batch(tuple(order[each]), tuple(shifts[each]), number) for each in places]
