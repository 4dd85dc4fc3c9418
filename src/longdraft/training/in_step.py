"""A target whose layers are spread over the processes of a run, each of which reads texts of its own.

A layer's weights are gathered from all processes whenever one computes it. So all processes run equally many forwards:
before each they agree whether anyone has text left, and those that have none compute a token along. Gathering and the
draft's gradients are exchanged by one thread, in the order of the program, which is the same in all processes;
features are not read ahead.
"""

from __future__ import annotations

from typing import Any

import torch

from longdraft.attention.block import Block
from longdraft.memory.store import KVStore
from longdraft.model.outputs import TargetOutput
from longdraft.model.runner import TargetRunner


class InStepRunner(TargetRunner):
    """Runs a model that :func:`longdraft.model.layer_shards.shard_layers` has spread."""

    _idle: KVStore | None = None

    def forward(self, block: Block, store: KVStore, **options: Any) -> TargetOutput:
        """A forward, in which the other processes take part. Arguments as in :meth:`TargetRunner.forward`."""
        self._anyone(True)
        return super().forward(block, store, **options)

    def finish(self) -> None:
        """Computes along with the other processes until each of them has called this."""
        while self._anyone(False):
            if self._idle is None:
                self._idle = self.new_store(1, 1)
            super().forward(self._idle.block([0], [[0]], prompt=True, text=1), self._idle, logits="none")

    def _anyone(self, reads: bool) -> bool:
        """True if any process is about to read; this one says whether it is."""
        reading = torch.tensor(float(reads), device=self.device)
        torch.distributed.all_reduce(reading)
        return bool(reading > 0)
