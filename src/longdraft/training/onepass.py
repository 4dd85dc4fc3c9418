"""How a one-pass draft is trained: as EAGLE-3's steps, but that a later step knows its anchor alone.

Row t of step k stands k tokens behind its anchor, row t - k, whose embedding and features are all it is given; what it
sees is what EAGLE-3's training-time test sees (:mod:`longdraft.training.drafted_attention`): the rows that the anchor
sees, and the rows of steps 1 .. k on its own way. The bigram is given the text's token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

import torch

from longdraft.drafters.eagle3_block import Eagle3Block
from longdraft.drafters.onepass_block import OnePassBlock, OnePassShape
from longdraft.drafters.onepass_draft import KIND, OnePassDraft
from longdraft.drafts import draft_folder
from longdraft.errors import ConfigError
from longdraft.training import eagle3
from longdraft.training.config import OnePassConfig
from longdraft.training.eagle3 import Eagle3Trainee
from longdraft.training.features import Features
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, never, silent
from longdraft.training.trainee import StepOutput


class OnePassTrainee(Eagle3Trainee):
    """The block with what it borrows from the target."""

    block: OnePassBlock
    slides = False

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), steps: int | None = None
    ) -> StepOutput:
        return super().forward(documents, shifts, min(steps or self.steps, self.block.shape.slots))

    def feed(
        self, x: torch.Tensor, g: torch.Tensor, out: torch.Tensor, fed: torch.Tensor, following: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x[fed], g[fed]

    def enter(self, step: int, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block.behind(x, g, slice(step - 1, step))

    def heads(self, hidden: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # One product for both: the bigram's rows beside the states, its matrix beside the head.
        head = torch.cat([self.block.lm_head.weight, self.block.bigram_out.weight], 1)
        return torch.cat([hidden, self.block.known(before).to(hidden.dtype)], 1), head.to(self._product_dtype)


def train_onepass(
    config: OnePassConfig, progress: Progress = silent, stop: Callable[[], bool] = never
) -> Iterator[Report]:
    """Trains a one-pass draft, as :mod:`longdraft.training.session` says."""
    if config.init is not None and draft_folder.kind(config.init) == KIND:
        config = _further(config, config.init)

    def shaped(block: Eagle3Block) -> Eagle3Block:
        if isinstance(block, OnePassBlock):
            return block
        found = OnePassBlock(OnePassShape(**asdict(block.shape), slots=config.ttt, rank=config.rank))
        found.initialise_slots(config.seed)
        found.load_state_dict(found.state_dict() | block.state_dict())
        return found

    return eagle3.run(config, KIND, OnePassTrainee, shaped, progress, stop)


def _further(config: OnePassConfig, init: str) -> OnePassConfig:
    """The settings with what the draft in ``init`` brings.

    Raises:
        ConfigError: they ask for something else.
    """
    shape = OnePassDraft.load(init).shape
    for name, own in (("ttt", shape.slots), ("rank", shape.rank)):
        if name in config.fields_set and getattr(config, name) != own:
            raise ConfigError(f"{name} {getattr(config, name)}: the draft in init has {own}; leave it out.")
    return replace(config, ttt=shape.slots, rank=shape.rank)
