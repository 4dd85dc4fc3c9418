"""Trains EAGLE-1 drafts: the step with its loss (:class:`EagleTrainer`), and the run (:func:`train_eagle`).

EAGLE (Li et al. 2024, arXiv:2401.15077). A feature f(t) is the target's hidden state at position t after the final
norm. The draft's input at position t is f(t) and the embedding of token t + 1. The output o(t) predicts f(t + 1), and
so token t + 2, for which the target's head gives the logits:

    loss = SmoothL1(o(t), f(t + 1)) + classification * cross-entropy(head(o(t)), target's distribution of token t + 2)

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
from longdraft.model.rope import RotaryEmbedding, make_rope_parameters
from longdraft.model.shared_parts import SharedParts
from longdraft.training.config import EVAL_DEPTH, EagleConfig
from longdraft.training.eagle3 import Eagle3Trainer
from longdraft.training.loop import Reports, TrainingLoop
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import PackedBatch, StepOutput

# The training loop gives each document a random shift of 1 .. NOISE_SEEDS in each epoch. EAGLE uses it as noise seed.
NOISE_SEEDS = 1 << 30


class EagleTrainer(Eagle3Trainer):
    """A training step of an EAGLE-1 block: EAGLE-3's step without the training-time test, with a regression loss.

    Attributes:
        classification: weight of the cross-entropy; the regression has weight 1.
        feature_noise: largest magnitude of the noise on features; 0: none.
    """

    block: EagleBlock

    def __init__(self, block: EagleBlock, parts: SharedParts, rotary: RotaryEmbedding, config: EagleConfig) -> None:
        super().__init__(block, parts, rotary, None, config)
        self.classification, self.feature_noise = config.classification, config.feature_noise

    def project_features(self, batch: PackedBatch, shifts: Sequence[int]) -> torch.Tensor:
        features = super().project_features(batch, shifts)
        if not self.training or not self.feature_noise:
            return features
        hidden_size, documents = self.block.shape.hidden_size, zip(shifts, batch.input_lengths, strict=True)
        # Made on the CPU, so that the noise does not depend on the device. Uniform in 0 .. 1, then in -1 .. 1.
        noise = [torch.rand(n, hidden_size, generator=torch.Generator().manual_seed(seed)) for seed, n in documents]
        return features + self.feature_noise * (2 * torch.cat(noise) - 1).to(features.device)

    def states_and_head(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return states, self.target_head

    def adjust_loss(self, batch: PackedBatch, states: torch.Tensor, result: StepOutput) -> StepOutput:
        """Returns the sum of regression and weighted cross-entropy. Step 0 alone counts: training has no other."""
        num_labels = sum(batch.num_labels)
        spans = zip(batch.documents, batch.spans, strict=True)
        next_states = torch.cat([d.hidden[span.label_start + 1 : span.end + 1] for d, span in spans])
        with torch.no_grad():
            next_features = self.block.project_features(next_states.to(self.device, self.matmul_dtype)).float()
        assert result.loss_mask is not None
        errors = F.smooth_l1_loss(states[:num_labels], next_features, reduction="none").mean(-1)
        regression = (errors * result.loss_mask[:num_labels]).sum()
        return result._replace(loss=regression + self.classification * result.loss)


def train_eagle(config: EagleConfig, progress: Progress = no_progress, stop: Stop = never_stop) -> Reports:
    """Trains an EAGLE-1 draft; see :mod:`longdraft.training.session`."""
    init = None if config.init is None else EagleDraft.load(config.init)
    session = TrainingSession(config, levels=EVAL_DEPTH, progress=progress, stop=stop)
    runner = session.runner
    feature_layers: tuple[int, ...] = (runner.num_layers - 1,)
    if init is None:
        hidden_size, description = runner.shared_parts.hidden_size, runner.shared_parts.description
        rope = make_rope_parameters(float(config.rope_theta or description.get("rope_theta") or DEFAULT_ROPE_THETA))
        block = EagleBlock(EagleShape(**session.draft_sizes(), feature_size=hidden_size, vocabulary=runner.vocab_size))
        block.initialize(config.seed)
        with torch.no_grad():  # fc's last columns multiply the feature: a new block passes the feature through
            block.fc.weight[:, hidden_size:] += torch.eye(hidden_size)
    else:
        init.check(runner)
        block, rope, feature_layers = init.trainable_module(), init.rope, init.feature_layers(runner)
    # The block needs the target's norm alone: the trainer computes the logits.
    block.borrow_target_head(runner, lambda out: out)
    rotary = RotaryEmbedding(block.shape.head_dim, rope, device=runner.device)
    trainer = EagleTrainer(block, runner.shared_parts, rotary, config)
    draft_config = asdict(block.shape) | {
        "feature_layers": list(feature_layers),
        "rope_theta": rope["rope_theta"],
        "trained_length": config.max_length,
        **({} if rope["rope_type"] == "default" else {"rope_parameters": rope}),
    }
    yield from TrainingLoop(
        session, trainer, feature_layers, EAGLE, draft_config, levels=1, max_shift=NOISE_SEEDS
    ).run()
