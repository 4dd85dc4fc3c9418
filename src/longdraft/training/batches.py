"""The documents of each batch: a function of seed and epoch alone, so that a resumed run sees the same."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from longdraft.training.config import RunConfig


class Batch(NamedTuple):
    """Numbers of packed documents, the shift j of each (flash noisy training), and the epoch from 0 on."""

    documents: Sequence[int]
    shifts: Sequence[int]
    epoch: int = 0


class Schedule:
    """The batches of each step: a group of ``processes * accumulate``.

    An incomplete last group of an epoch is left out; the next epoch's shuffle puts other documents into it. If an epoch
    makes no complete group, its one step takes as many batches as all processes can have alike, so that none waits for
    the others; :meth:`at` then returns no batch if there are fewer batches than processes.

    Args:
        rows: learned tokens of each document. A batch is closed when one more would exceed ``config.rows``.
        shifts: those of documents are uniform in 1 .. shifts.

    Attributes:
        counts: steps of each epoch. steps: of all. width: batches of a step.
    """

    def __init__(self, rows: Sequence[int], config: RunConfig, shifts: int = 1, processes: int = 1) -> None:
        self._rows, self._config, self._shifts, self._processes = rows, config, shifts, processes
        self._epoch = lru_cache(1)(self._laid_out)
        self.width, epochs = processes * config.accumulate, config.epochs
        self.counts = [max(1, len(self._epoch(i)[2]) // self.width) for i in range(math.ceil(epochs))]
        if epochs % 1:
            self.counts[-1] = max(1, int(self.counts[-1] * (epochs % 1)))
        self.steps = min(sum(self.counts), config.max_steps or sum(self.counts))

    def at(self, step: int) -> list[Batch]:
        """The batches of one step. Process i takes every n-th of them from the i-th on."""
        number = 0
        while step >= self.counts[number]:
            step -= self.counts[number]
            number += 1
        order, shifts, ends = self._epoch(number)
        first = step * self.width
        count = min(self.width, len(ends) - first) // self._processes * self._processes
        places = [slice(ends[i - 1] if i else 0, ends[i]) for i in range(first, first + count)]
        return [Batch(order[each], shifts[each], number) for each in places]

    def _laid_out(self, epoch: int) -> tuple[array[int], array[int], array[int]]:
        """An epoch's documents in their order, each one's shift, and where batches end: 8 bytes a document."""
        rng = random.Random(f"{self._config.seed}/{epoch}")
        order = array("i", range(len(self._rows)))
        rng.shuffle(order)
        ends, filled = array("i"), 0
        for place, i in enumerate(order):
            if place and filled + self._rows[i] > self._config.rows:
                ends.append(place)
                filled = 0
            filled += self._rows[i]
        ends.append(len(order))
        return order, array("i", (rng.randint(1, self._shifts) for _ in order)), ends
