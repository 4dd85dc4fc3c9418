"""Training of EAGLE-1 drafts: the step with its loss (:class:`EagleTrainee`), and the run (:func:`train_eagle`).

EAGLE (Li et al. 2024, arXiv:2401.15077). With f the target's last hidden state behind its final norm, row t
joins f(t) with the embedding of token t + 1. Its output o(t) is what f(t + 1) will be, and says token t + 2:

    loss = SmoothL1(o(t), f(t + 1)) + w * cross-entropy(head(o(t)), target's distribution of token t + 2)

Uniform noise is added to f(t), because a drafted row has an earlier o in its place, which is never quite right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from torch.nn import functional as F

from longdraft.drafters.eagle import EagleBlock, EagleDraft
from longdraft.drafts.eagle_formats import EAGLE, EagleShape
from longdraft.drafts.formats import THETA
from longdraft.model.rotary import Rotary, yarn
from longdraft.model.shared_parts import SharedParts
from longdraft.training.config import DEPTH, EagleConfig
from longdraft.training.eagle3 import Eagle3Trainee
from longdraft.training.loop import Loop, Report
from longdraft.training.session import Progress, Session, Stop, never, silent
from longdraft.training.trainee import Pack, StepOutput

# Every document gets a number below this in each epoch, which seeds its noise.
SEEDS = 1 << 30


class EagleTrainee(Eagle3Trainee):
    """A training step of an EAGLE-1 block: one step, since there is no training-time test."""

    block: EagleBlock

    def __init__(self, block: EagleBlock, parts: SharedParts, rotary: Rotary, config: EagleConfig) -> None:
        super().__init__(block, parts, rotary, None, config)
        self.classification, self.noise = config.classification, config.feature_noise

    def states(self, pack: Pack, shifts: Sequence[int]) -> torch.Tensor:
        g = super().states(pack, shifts)
        if not self.training or not self.noise:
            return g
        size, rows = self.block.shape.hidden_size, zip(shifts, pack.lengths, strict=True)
        # The same numbers for the same document and epoch, on every device.
        moved = [torch.rand(n, size, generator=torch.Generator().manual_seed(seed)) for seed, n in rows]
        return g + self.noise * (2 * torch.cat(moved) - 1).to(g.device)

    def heads(self, hidden: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self.target_head

    def loss(self, pack: Pack, out: torch.Tensor, said: StepOutput) -> StepOutput:
        rows = sum(pack.counts)  # later steps are for measuring alone
        each = zip(pack.documents, pack.spans, strict=True)
        following = torch.cat([d.hidden[first + 1 : end + 1] for d, (_, first, end) in each])
        with torch.no_grad():
            target = self.block.project(following.to(self.device, self.product_dtype)).float()
        assert said.learned is not None
        regression = (F.smooth_l1_loss(out[:rows], target, reduction="none").mean(-1) * said.learned[:rows]).sum()
        return said._replace(loss=regression + self.classification * said.loss)


def train_eagle(config: EagleConfig, progress: Progress = silent, stop: Stop = never) -> Iterator[Report]:
    """Trains an EAGLE-1 draft; see :mod:`longdraft.training.session`."""
    init = None if config.init is None else EagleDraft.load(config.init)
    session = Session(config, DEPTH, progress, stop)
    runner = session.runner
    layers: tuple[int, ...] = (runner.depth - 1,)
    if init is None:
        rope = yarn(float(config.rope_theta or runner.parts.description.get("rope_theta") or THETA))
        size = runner.parts.hidden_size
        block = EagleBlock(EagleShape(**session.sizes(), feature_size=size, vocabulary=runner.vocab_size))
        block.initialise(config.seed)
        with torch.no_grad():  # at first it repeats the state it reads
            block.fc.weight[:, size:] += torch.eye(size)
    else:
        init.check(runner)
        block, rope, layers = init.trainable(), init.rope, init.feature_layers(runner)
    block.borrow_of(runner, lambda out: out)
    trainee = EagleTrainee(block, runner.parts, Rotary(block.shape.head_dim, rope, device=runner.device), config)
    described = asdict(block.shape) | {
        "feature_layers": list(layers),
        "rope_theta": rope["rope_theta"],
        "trained_length": config.max_length,
        **({} if rope["rope_type"] == "default" else {"rope_parameters": rope}),
    }
    yield from Loop(session, trainee, layers, EAGLE, described, levels=1, shifts=SEEDS).run()
