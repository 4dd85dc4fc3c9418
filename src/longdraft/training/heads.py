"""Training of chained heads: the step with its loss (:class:`HeadsTrainer`), and the run (:func:`train_heads`).

TokenSwift (Wu et al. 2025). Row t has the target's hidden state of token t before the final norm, from which the target
itself predicts token t + 1; head i predicts token t + 1 + i. The target is not trained, and no head sees a later token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate, pairwise

import torch

from longdraft.drafters.heads import KIND, HeadsBlock, HeadsDraft, HeadsShape
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import final_norm_weight
from longdraft.training.config import HeadsConfig
from longdraft.training.features import Features
from longdraft.training.loop import StepReport, TrainingLoop
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import DraftTrainer, StepOutput


class HeadsTrainer(DraftTrainer):
    """A training step of all heads."""

    block: HeadsBlock
    label_shift = 2  # token t + 1 is the root, which the target predicts itself

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), levels: int | None = None
    ) -> StepOutput:
        """The loss of packed documents: sum over rows and heads i of decay^(i - 1) * cross-entropy.

        Args:
            shifts, levels: not used; every row goes through every head.

        Returns:
            ``depths`` are 1 for the first head, and so on.
        """
        pack = self.pack(documents, num_context=0)
        # Row r of head i + 1 predicts what row r + i of head 1 predicts, so the last i rows of a document drop out.
        bounds = list(pairwise(accumulate(pack.loss_lengths, initial=0)))
        rows = [
            torch.cat([torch.arange(begin, max(begin, end - i)) for begin, end in bounds])
            for i in range(self.block.shape.heads)
        ]
        # Sums of the residual stream are float32; autocast decides about the products.
        states = self.block(pack.gather([d.hidden for d in documents]).to(self.device).float())
        hidden = torch.cat([state[row.to(self.device)] for state, row in zip(states, rows, strict=True)])
        labels = self.labels(pack, torch.cat([row + i for i, row in enumerate(rows)]).to(self.device))
        depths = torch.cat([torch.full_like(row, i + 1) for i, row in enumerate(rows)]).to(self.device)
        return self.output(hidden, self.target_head, labels, depths, self.decay ** (depths - 1))


def train_heads(config: HeadsConfig, progress: Progress = no_progress, stop: Stop = never_stop) -> Iterator[StepReport]:
    """Trains chained heads; see :mod:`longdraft.training.session`."""
    # Before the target is loaded, so that a wrong folder is reported at once.
    init = None if config.init is None else HeadsDraft.load(config.init)
    heads = config.heads if init is None else init.shape.heads
    session = TrainingSession(config, heads, progress, stop)
    runner, fit = session.runner, None
    if init is None:
        kept = session.vocabulary()
        block = HeadsBlock(HeadsShape(runner.shared_parts.hidden_size, heads, runner.shared_parts.rms_norm_eps))
        fit = partial(_fit, block, runner)
    else:
        init.check(runner)
        kept, block = init.draft_to_target_ids, init.trainable_module()
    trainer = HeadsTrainer(block, runner.shared_parts, kept, config)
    described = asdict(block.shape) | {"trained_length": config.max_length}
    yield from TrainingLoop(
        session, trainer, (runner.num_layers - 1,), KIND, described, levels=heads, eval_levels=heads, on_start=fit
    ).run()


def _fit(block: HeadsBlock, runner: TargetRunner, document: Features) -> None:
    """Scales fresh heads to the target's final norm and to the size of its states."""
    # The median, because the first token's state can be a thousand times as large as the others.
    size = float(document.hidden.cpu().float().square().mean(-1).sqrt().median())
    block.initialize(final_norm_weight(runner.model).cpu(), size)
