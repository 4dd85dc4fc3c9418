"""Training of one-pass drafts: EAGLE-3's training with other later steps.

Row t of step k stands k tokens after its anchor, row t - k. Its inputs are the anchor's embedding and features and two
learned vectors of step k. As in EAGLE-3's training-time test (:mod:`longdraft.training.attention`), it sees the
rows that the anchor sees and the rows of steps 1 .. k on its own path. The bigram reads the text's token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch

from longdraft.drafters.eagle3 import Eagle3Block
from longdraft.drafters.onepass import KIND, OnePassBlock, OnePassDraft, OnePassShape
from longdraft.drafts.kinds import kind_of
from longdraft.training import eagle3
from longdraft.training.config import OnePassConfig
from longdraft.training.eagle3 import Eagle3Trainee
from longdraft.training.features import Features
from longdraft.training.loop import Report
from longdraft.training.session import Progress, Stop, never, silent
from longdraft.training.trainee import StepOutput


class OnePassTrainee(Eagle3Trainee):
    """A training step of a one-pass block. Arguments are those of :class:`Eagle3Trainee`."""

    block: OnePassBlock
    slides = False

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), steps: int | None = None
    ) -> StepOutput:
        return super().forward(documents, shifts, min(steps or self.steps, self.block.shape.slots))

    def inputs(
        self, step: int, x: torch.Tensor, g: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        anchors = rows - step
        return self.block.behind(x[anchors], g[anchors], slice(step - 1, step))

    def heads(self, hidden: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # One product for head and bigram: the bigram's rows beside the states, its matrix beside the head.
        head = torch.cat([self.block.lm_head.weight, self.block.bigram_out.weight], 1)
        return torch.cat([hidden, self.block.known(before).to(hidden.dtype)], 1), head.to(self.product_dtype)


def train_onepass(config: OnePassConfig, progress: Progress = silent, stop: Stop = never) -> Iterator[Report]:
    """Trains a one-pass draft; see :mod:`longdraft.training.session`."""
    if config.init is not None and kind_of(config.init).name == KIND:
        shape = OnePassDraft.load(config.init).shape
        config = replace(config, ttt=shape.slots, rank=shape.rank)

    def with_slots(block: Eagle3Block) -> Eagle3Block:
        if isinstance(block, OnePassBlock):
            return block
        onepass = OnePassBlock(OnePassShape(**asdict(block.shape), slots=config.ttt, rank=config.rank))
        onepass.initialise_slots(config.seed)
        onepass.load_state_dict(onepass.state_dict() | block.state_dict())
        return onepass

    return eagle3.run(config, KIND, OnePassTrainee, with_slots, progress, stop)
