"""Samples the batches of a training run, by the seed alone."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from longdraft.training.config import RunConfig


class BatchIndices(NamedTuple):
    """A batch: indices of documents, a shift j for each document (flash noisy training), and the epoch, from 0."""

    documents: Sequence[int]
    shifts: Sequence[int]
    epoch: int = 0


class ShuffledEpoch(NamedTuple):
    """An epoch: indices of documents in random order, a shift for each, and the end of each batch in that order."""

    order: array[int]
    shifts: array[int]
    ends: array[int]


class BatchSampler:
    """Samples the ``num_processes * accumulate`` batches of each step, by the seed alone.

    The last batches of an epoch are dropped if they do not fill a step. If all batches of an epoch do not fill a step,
    the epoch has one step, whose number of batches is a multiple of ``num_processes`` (possibly 0).

    Args:
        loss_tokens: number of tokens in the loss of each document. A batch has one document, or several documents with
            at most ``config.rows`` tokens in the loss.
        max_shift: shifts are uniform in 1 .. max_shift.

    Attributes:
        steps: number of steps of the run.
        steps_per_epoch: number of steps of each epoch.
        batches_per_step: number of batches of a step, of all processes together.
    """

    def __init__(
        self, loss_tokens: Sequence[int], config: RunConfig, max_shift: int = 1, num_processes: int = 1
    ) -> None:
        self._loss_tokens, self._config = loss_tokens, config
        self._max_shift, self._num_processes = max_shift, num_processes
        self._epoch = lru_cache(1)(self._shuffle_epoch)  # successive steps need the same epoch
        self.batches_per_step = num_processes * config.accumulate
        epochs = map(self._epoch, range(math.ceil(config.epochs)))
        steps_per_epoch = [max(1, len(epoch.ends) // self.batches_per_step) for epoch in epochs]
        if config.epochs % 1:  # the last epoch is a part
            steps_per_epoch[-1] = max(1, int(steps_per_epoch[-1] * (config.epochs % 1)))
        self.steps_per_epoch, num_steps = steps_per_epoch, sum(steps_per_epoch)
        self.steps = min(num_steps, config.max_steps or num_steps)

    def batches(self, step: int) -> list[BatchIndices]:
        """Returns the batches of a step. Process i of n takes the batches i, i + n, i + 2n, ..."""
        epoch = 0
        while step >= self.steps_per_epoch[epoch]:
            step -= self.steps_per_epoch[epoch]
            epoch += 1
        order, shifts, ends = self._epoch(epoch)
        first = step * self.batches_per_step
        num_batches = min(self.batches_per_step, len(ends) - first) // self._num_processes * self._num_processes
        slices = [slice(ends[i - 1] if i else 0, ends[i]) for i in range(first, first + num_batches)]
        return [BatchIndices(order[part], shifts[part], epoch) for part in slices]

    def _shuffle_epoch(self, epoch: int) -> ShuffledEpoch:
        """Shuffles an epoch's documents, and divides them into batches."""
        rng = random.Random(f"{self._config.seed}/{epoch}")
        order = array("i", range(len(self._loss_tokens)))
        rng.shuffle(order)
        ends, filled = array("i"), 0
        for position, i in enumerate(order):
            if position and filled + self._loss_tokens[i] > self._config.rows:
                ends.append(position)
                filled = 0
            filled += self._loss_tokens[i]
        ends.append(len(order))
        return ShuffledEpoch(order, array("i", (rng.randint(1, self._max_shift) for _ in order)), ends)
