"""Training of EAGLE-1 drafts: the step with its loss (:class:`EagleTrainer`), and the run (:func:`train_eagle`).

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
from longdraft.drafts.formats import DEFAULT_ROPE_THETA
from longdraft.model.rotary import RotaryEmbedding, make_rope_parameters
from longdraft.model.shared_parts import SharedParts
from longdraft.training.config import EVAL_DEPTH, EagleConfig
from longdraft.training.eagle3 import Eagle3Trainer
from longdraft.training.loop import StepReport, TrainingLoop
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import PackedBatch, StepOutput

# Every document gets a number below this in each epoch, which seeds its noise.
NOISE_SEEDS = 1 << 30


class EagleTrainer(Eagle3Trainer):
    """A training step of an EAGLE-1 block: one step, since there is no training-time test."""

    block: EagleBlock

    def __init__(self, block: EagleBlock, parts: SharedParts, rotary: RotaryEmbedding, config: EagleConfig) -> None:
        super().__init__(block, parts, rotary, None, config)
        self.classification, self.feature_noise = config.classification, config.feature_noise

    def project_features(self, pack: PackedBatch, shifts: Sequence[int]) -> torch.Tensor:
        g = super().project_features(pack, shifts)
        if not self.training or not self.feature_noise:
            return g
        size, rows = self.block.shape.hidden_size, zip(shifts, pack.input_lengths, strict=True)
        # The same numbers for the same document and epoch, on every device.
        moved = [torch.rand(n, size, generator=torch.Generator().manual_seed(seed)) for seed, n in rows]
        return g + self.feature_noise * (2 * torch.cat(moved) - 1).to(g.device)

    def states_and_head(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self.target_head

    def step_loss(self, pack: PackedBatch, out: torch.Tensor, output: StepOutput) -> StepOutput:
        rows = sum(pack.loss_lengths)  # later steps are for measuring alone
        each = zip(pack.documents, pack.spans, strict=True)
        following = torch.cat([d.hidden[first + 1 : end + 1] for d, (_, first, end) in each])
        with torch.no_grad():
            target = self.block.project_features(following.to(self.device, self.matmul_dtype)).float()
        assert output.loss_mask is not None
        regression = (F.smooth_l1_loss(out[:rows], target, reduction="none").mean(-1) * output.loss_mask[:rows]).sum()
        return output._replace(loss=regression + self.classification * output.loss)


def train_eagle(config: EagleConfig, progress: Progress = no_progress, stop: Stop = never_stop) -> Iterator[StepReport]:
    """Trains an EAGLE-1 draft; see :mod:`longdraft.training.session`."""
    init = None if config.init is None else EagleDraft.load(config.init)
    session = TrainingSession(config, EVAL_DEPTH, progress, stop)
    runner = session.runner
    layers: tuple[int, ...] = (runner.num_layers - 1,)
    if init is None:
        rope = make_rope_parameters(
            float(config.rope_theta or runner.shared_parts.description.get("rope_theta") or DEFAULT_ROPE_THETA)
        )
        size = runner.shared_parts.hidden_size
        block = EagleBlock(EagleShape(**session.draft_sizes(), feature_size=size, vocabulary=runner.vocab_size))
        block.initialize(config.seed)
        with torch.no_grad():  # at first it repeats the state it reads
            block.fc.weight[:, size:] += torch.eye(size)
    else:
        init.check(runner)
        block, rope, layers = init.trainable_module(), init.rope, init.feature_layers(runner)
    block.borrow_target_head(runner, lambda out: out)
    trainer = EagleTrainer(
        block, runner.shared_parts, RotaryEmbedding(block.shape.head_dim, rope, device=runner.device), config
    )
    described = asdict(block.shape) | {
        "feature_layers": list(layers),
        "rope_theta": rope["rope_theta"],
        "trained_length": config.max_length,
        **({} if rope["rope_type"] == "default" else {"rope_parameters": rope}),
    }
    yield from TrainingLoop(session, trainer, layers, EAGLE, described, levels=1, max_shift=NOISE_SEEDS).run()
