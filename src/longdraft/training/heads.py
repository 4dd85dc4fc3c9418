"""Trains chained heads: the step with its loss (:class:`HeadsTrainer`), and the run (:func:`train_heads`).

TokenSwift (Wu et al. 2025). The input at position t is the target's hidden state before the final norm. The target
predicts token t + 1 from this state, and head i = 1, 2, ... predicts token t + 1 + i. The target is not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate, pairwise

import torch
from transformers import PreTrainedModel

from longdraft.drafters.heads import KIND, HeadsBlock, HeadsDraft, HeadsShape
from longdraft.errors import UnsupportedModelError
from longdraft.model.model_parts import decoder_config, norm_before_head
from longdraft.model.runner import TargetRunner
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.training.config import HeadsConfig
from longdraft.training.features import Features
from longdraft.training.loop import Reports, TrainingLoop
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import DraftTrainer, StepOutput


class HeadsTrainer(DraftTrainer):
    """A training step of all heads."""

    block: HeadsBlock
    label_shift = 2  # the target itself predicts token t + 1, the root of the draft tree

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), levels: int | None = None
    ) -> StepOutput:
        """Returns the loss of packed documents: sum over labels and heads i of decay^(i - 1) * cross-entropy.

        ``shifts`` and ``levels`` are not used; all heads are computed. ``depths`` of the result are i.
        """
        batch = self.pack(documents, context=0)
        # Head i predicts i - 1 tokens further than head 1. So its label at index t is head 1's label at t + i - 1, and
        # the last i - 1 indices of a document have no label.
        bounds = list(pairwise(accumulate(batch.num_labels, initial=0)))
        indices = [  # by head
            torch.cat([torch.arange(begin, max(begin, end - distance)) for begin, end in bounds])
            for distance in range(self.block.shape.heads)
        ]
        # The residual stream is float32; autocast chooses the dtype of matrix products.
        states = self.block(batch.gather([d.hidden for d in documents]).to(self.device).float())
        hidden = torch.cat([state[positions.to(self.device)] for state, positions in zip(states, indices, strict=True)])
        label_indices = torch.cat([positions + distance for distance, positions in enumerate(indices)])
        labels = self.make_labels(batch, label_indices.to(self.device))
        depths = torch.cat([torch.full_like(positions, i) for i, positions in enumerate(indices, 1)]).to(self.device)
        return self.compute_loss(hidden, self.target_head, labels, depths, self.decay ** (depths - 1))


def train_heads(config: HeadsConfig, progress: Progress = no_progress, stop: Stop = never_stop) -> Reports:
    """Trains chained heads; see :mod:`longdraft.training.session`."""
    # Read before the target is loaded, to report a wrong folder at once.
    init = None if config.init is None else HeadsDraft.load(config.init)
    num_heads = config.heads if init is None else init.shape.heads
    session = TrainingSession(config, levels=num_heads, progress=progress, stop=stop)
    runner, on_start = session.runner, None
    if init is None:
        draft_to_target = session.vocabulary()
        block = HeadsBlock(HeadsShape(runner.shared_parts.hidden_size, num_heads, runner.shared_parts.rms_norm_eps))
        on_start = partial(_initialize, block, runner)
    else:
        init.check(runner)
        draft_to_target, block = init.draft_to_target_ids, init.trainable_module()
    trainer = HeadsTrainer(block, runner.shared_parts, draft_to_target, config)
    draft_config = asdict(block.shape) | {"trained_length": config.max_length}
    layers, levels = (runner.num_layers - 1,), {"levels": num_heads, "eval_levels": num_heads}
    yield from TrainingLoop(session, trainer, layers, KIND, draft_config, **levels, on_start=on_start).run()


def _initialize(block: HeadsBlock, runner: TargetRunner, document: Features) -> None:
    """Initializes new heads with the weight of the target's final norm and the scale of the target's states."""
    # The median, because the state of the first token can be a thousand times as large as other states.
    scale = float(document.hidden.cpu().float().square().mean(-1).sqrt().median())
    block.initialize(_final_norm_weight(runner.model).cpu(), scale)


def _final_norm_weight(model: PreTrainedModel) -> torch.Tensor:
    """Returns the weight (hidden_size,), float32, of the RMSNorm between the last layer and the head.
    Raises UnsupportedModelError if there is no such norm."""
    size = int(decoder_config(model).hidden_size)
    norm = norm_before_head(model)
    x = torch.ones(1, size, dtype=model.dtype, device=model.device)
    # RMSNorm of ones gives the weight, also if it is stored minus one. A norm that subtracts the mean gives zeros.
    with torch.no_grad():
        weight = torch.zeros(size, **CPU_FLOAT32) if norm is None else norm(x)[0].float()
    if not bool(weight.any()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no RMSNorm before its head, so no draft heads can be trained for it."
        )
    return weight
