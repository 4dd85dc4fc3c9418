"""Trains EAGLE-1 drafts: the step with its loss (:class:`EagleTrainer`), and the run (:func:`train_eagle`).

EAGLE (Li et al. 2024, arXiv:2401.15077). f is the target's last hidden state after its final norm. The input at
position t is f(t) and the embedding of token t + 1. The output o(t) predicts f(t + 1), and so token t + 2:

    loss = SmoothL1(o(t), f(t + 1)) + w * cross-entropy(head(o(t)), target's distribution of token t + 2)

Uniform noise is added to f(t), because in drafting the input is an earlier output o, which is inexact.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from longdraft.training.loop import Reports, TrainingLoop
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import PackedBatch, StepOutput

# The shift of a document, random in 1 .. NOISE_SEEDS and new in each epoch, is the seed of its noise.
NOISE_SEEDS = 1 << 30


class EagleTrainer(Eagle3Trainer):
    """A training step of an EAGLE-1 block: EAGLE-3's step without the training-time test, with a regression loss."""

    block: EagleBlock

    def __init__(self, block: EagleBlock, parts: SharedParts, rotary: RotaryEmbedding, config: EagleConfig) -> None:
        super().__init__(block, parts, rotary, None, config)
        self.classification, self.feature_noise = config.classification, config.feature_noise

    def project_features(self, pack: PackedBatch, shifts: Sequence[int]) -> torch.Tensor:
        features = super().project_features(pack, shifts)
        if not self.training or not self.feature_noise:
            return features
        size, seeds = self.block.shape.hidden_size, zip(shifts, pack.input_lengths, strict=True)
        # Made on the CPU, so that the noise does not depend on the device.
        noise = [torch.rand(n, size, generator=torch.Generator().manual_seed(seed)) for seed, n in seeds]
        return features + self.feature_noise * (2 * torch.cat(noise) - 1).to(features.device)

    def states_and_head(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self.target_head

    def step_loss(self, pack: PackedBatch, out: torch.Tensor, output: StepOutput) -> StepOutput:
        n = sum(pack.loss_lengths)  # outputs of step 0; only measurements have later steps
        spans = zip(pack.documents, pack.spans, strict=True)
        next_states = torch.cat([d.hidden[first + 1 : end + 1] for d, (_, first, end) in spans])
        with torch.no_grad():
            target = self.block.project_features(next_states.to(self.device, self.matmul_dtype)).float()
        assert output.loss_mask is not None
        regression = (F.smooth_l1_loss(out[:n], target, reduction="none").mean(-1) * output.loss_mask[:n]).sum()
        return output._replace(loss=regression + self.classification * output.loss)


def train_eagle(config: EagleConfig, progress: Progress = no_progress, stop: Stop = never_stop) -> Reports:
    """Trains an EAGLE-1 draft; see :mod:`longdraft.training.session`."""
    init = None if config.init is None else EagleDraft.load(config.init)
    session = TrainingSession(config, EVAL_DEPTH, progress, stop)
    runner = session.runner
    layers: tuple[int, ...] = (runner.num_layers - 1,)
    if init is None:
        size, description = runner.shared_parts.hidden_size, runner.shared_parts.description
        rope = make_rope_parameters(float(config.rope_theta or description.get("rope_theta") or DEFAULT_ROPE_THETA))
        block = EagleBlock(EagleShape(**session.draft_sizes(), feature_size=size, vocabulary=runner.vocab_size))
        block.initialize(config.seed)
        with torch.no_grad():  # so that a new block's fc passes the target's state through
            block.fc.weight[:, size:] += torch.eye(size)
    else:
        init.check(runner)
        block, rope, layers = init.trainable_module(), init.rope, init.feature_layers(runner)
    block.borrow_target_head(runner, lambda out: out)
    rotary = RotaryEmbedding(block.shape.head_dim, rope, device=runner.device)
    trainer = EagleTrainer(block, runner.shared_parts, rotary, config)
    draft_config = asdict(block.shape) | {
        "feature_layers": list(layers),
        "rope_theta": rope["rope_theta"],
        "trained_length": config.max_length,
        **({} if rope["rope_type"] == "default" else {"rope_parameters": rope}),
    }
    yield from TrainingLoop(session, trainer, layers, EAGLE, draft_config, levels=1, max_shift=NOISE_SEEDS).run()
