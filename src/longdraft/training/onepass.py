"""How a one-pass draft is trained: as EAGLE-3's steps, but that a later step knows its anchor alone.

Row t of step k stands k tokens behind its anchor, row t - k, whose embedding and features are all it is given; what it
sees is what EAGLE-3's training-time test sees (:mod:`longdraft.training.drafted_attention`): the rows up to the anchor,
and the rows of steps 1 .. k on its own way. The bigram is given the text's token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from longdraft.drafters.eagle3_block import Eagle3Block
from longdraft.drafters.onepass_block import OnePassBlock, OnePassShape
from longdraft.drafters.onepass_draft import KIND
from longdraft.training import eagle3
from longdraft.training.config import OnePassConfig
from longdraft.training.eagle3 import Eagle3Trainee
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, never, silent


class OnePassTrainee(Eagle3Trainee):
    """The block with what it borrows from the target."""

    block: OnePassBlock

    def feed(
        self, x: torch.Tensor, g: torch.Tensor, out: torch.Tensor, fed: torch.Tensor, following: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x[fed], g[fed]

    def enter(self, step: int, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block.slot(step, x, g) if step else (x, g)

    def heads(self, hidden: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # One product for both: the bigram's rows beside the states, its matrix beside the head.
        known = self.block.bigram_in(before.clamp_min(0)) * (before >= 0)[:, None]
        head = torch.cat([self.block.lm_head.weight, self.block.bigram_out.weight], 1)
        return torch.cat([hidden, known.to(hidden.dtype)], 1), head.to(self._product_dtype)


def train_onepass(
    config: OnePassConfig, progress: Progress = silent, stop: Callable[[], bool] = never
) -> Iterator[Report]:
    """Trains a one-pass draft, as :mod:`longdraft.training.session` says."""

    def shaped(block: Eagle3Block) -> Eagle3Block:
        if isinstance(block, OnePassBlock):
            return block
        found = OnePassBlock(OnePassShape(**asdict(block.shape), slots=config.ttt, rank=config.rank))
        found.initialise_slots(config.seed)
        found.load_state_dict(block.state_dict(), strict=False)
        return found

    return eagle3.run(config, KIND, OnePassTrainee, shaped, progress, stop)
