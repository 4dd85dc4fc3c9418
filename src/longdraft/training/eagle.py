"""Training of EAGLE-1 drafts: the step with its loss (:class:`EagleTrainee`), and the run (:func:`train_eagle`).

EAGLE (Li et al. 2024, arXiv:2401.15077). With f the target's last hidden state behind its final norm, row t
joins f(t) with the embedding of token t + 1. Its output o(t) is what f(t + 1) will be, and says token t + 2:

    loss = SmoothL1(o(t), f(t + 1)) + w * cross-entropy(head(o(t)), target's distribution of token t + 2)

Uniform noise is added to f(t), because a drafted row has an earlier o in its place, which is never quite right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F

from longdraft.drafters.eagle import EagleBlock, EagleDraft
from longdraft.drafts.eagle_formats import EAGLE, EagleShape
from longdraft.drafts.formats import THETA
from longdraft.model.rotary import Rotary, yarn
from longdraft.model.shared_parts import SharedParts
from longdraft.training.config import DEPTH, EagleConfig
from longdraft.training.eagle3 import Eagle3Trainee
from longdraft.training.loop import Report
from longdraft.training.session import Progress, Session, begin, never, silent
from longdraft.training.trainee import Pack, StepOutput

# Every document gets a number below this in each epoch, which seeds its noise.
SEEDS = 1 << 30


class EagleTrainee(Eagle3Trainee):
    """A training step of an EAGLE-1 block: one step, since there is no training-time test.

    Args:
        classification: w, the weight of the cross-entropy; the regression's is 1.
        noise: features are moved by up to this in either direction.
    """

    block: EagleBlock

    def __init__(
        self,
        block: EagleBlock,
        parts: SharedParts,
        rotary: Rotary,
        distill: float = 1.0,
        product_dtype: torch.dtype = torch.float32,
        classification: float = 0.1,
        noise: float = 0.1,
    ) -> None:
        super().__init__(block, parts, rotary, steps=1, distill=distill, product_dtype=product_dtype)
        self.classification, self.noise = classification, noise

    def states(self, pack: Pack, shifts: Sequence[int]) -> torch.Tensor:
        g = super().states(pack, shifts)
        if not self.training or not self.noise:
            return g
        moved = torch.cat([self._uniform(seed, rows) for seed, rows in zip(shifts, pack.lengths, strict=True)])
        return g + self.noise * moved.to(g.device)

    def _uniform(self, seed: int, rows: int) -> torch.Tensor:
        """Uniform numbers (rows, hidden) from -1 to 1, the same for the same seed on every device."""
        generator = torch.Generator().manual_seed(seed)
        return 2 * torch.rand(rows, self.block.shape.hidden_size, generator=generator) - 1

    def heads(self, hidden: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self.target_head

    def loss(self, pack: Pack, out: torch.Tensor, said: StepOutput) -> StepOutput:
        rows = sum(pack.counts)  # later steps are for measuring alone
        each = zip(pack.documents, pack.spans, strict=True)
        following = torch.cat([d.hidden[first + 1 : end + 1] for d, (_, first, end) in each])
        with torch.no_grad():
            target = self.block.project(following.to(self.device, self.product_dtype)).float()
        regression = F.smooth_l1_loss(out[:rows], target, reduction="none").mean(-1).sum()
        return said._replace(loss=regression + self.classification * said.loss)


def train_eagle(config: EagleConfig, progress: Progress = silent, stop: Callable[[], bool] = never) -> Iterator[Report]:
    """Trains an EAGLE-1 draft; see :mod:`longdraft.training.session`."""
    init = None if config.init is None else EagleDraft.load(config.init)
    session = begin(config, DEPTH, progress, stop)
    runner = session.runner
    layers: tuple[int, ...] = (runner.depth - 1,)
    if init is None:
        theta = config.rope_theta or runner.parts.description.get("rope_theta") or THETA
        block, rope = _new(config, session), yarn(float(theta))
    else:
        init.check(runner)
        block, rope, layers = init.trainable(), init.rope, init.feature_layers(runner)
    block.borrow(runner, lambda out: out)
    rotary = Rotary(block.shape.head_dim, rope, device=runner.device)
    trainee = EagleTrainee(
        block,
        runner.parts,
        rotary,
        config.distill,
        session.product_dtype,
        config.classification,
        config.feature_noise,
    )
    described = block.shape.as_dict() | {
        "feature_layers": list(layers),
        "rope_theta": rope["rope_theta"],
        "trained_length": config.max_length,
        **({} if rope["rope_type"] == "default" else {"rope_parameters": rope}),
    }
    yield from session.train(trainee, layers, EAGLE, described, levels=1, shifts=SEEDS)


def _new(config: EagleConfig, session: Session) -> EagleBlock:
    """A block that at first repeats the state it reads."""
    size = session.runner.parts.hidden_size
    shape = EagleShape(**session.sizes(), feature_size=size, vocabulary=session.runner.vocab_size)
    block = EagleBlock(shape)
    block.initialise(config.seed)
    with torch.no_grad():
        block.fc.weight[:, size:] += torch.eye(size)
    return block
