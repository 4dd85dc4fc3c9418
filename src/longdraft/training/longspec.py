"""Trains LongSpec drafts: the step with its loss (:class:`LongSpecTrainer`), and the run (:func:`train_longspec`).

LongSpec, section 3.2, flash noisy training. The input at position t is token t, the label is token t + 1.
Self-attention has a sliding window. Cross-attention sees the target's last-layer KV up to position t - j. The shift j
is random in 1 .. ``noise``: in drafting, the newest verified key lies j positions before a node at level j of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from longdraft.drafters.longspec import KIND, LongSpecBlock, LongSpecDraft, LongSpecShape, check_rotary
from longdraft.training.attention import attend
from longdraft.training.config import LongSpecConfig
from longdraft.training.features import Features
from longdraft.training.loop import Reports, TrainingLoop
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import DraftTrainer, StepOutput


class LongSpecTrainer(DraftTrainer):
    """A training step of a LongSpec block."""

    block: LongSpecBlock
    level_mode = "shift"

    def count_labels(self, num_tokens: int, start: int, shift: int) -> int:
        """Returns a document's number of labels. Positions below ``shift`` have none, because they see no key."""
        return num_tokens - 1 - max(start - 1, shift)

    def forward(self, documents: Sequence[Features], shifts: Sequence[int]) -> StepOutput:
        """Returns the loss of packed documents, with a shift j for each. ``depths`` of the result are the shifts."""
        window = self.block.shape.window
        batch = self.pack(documents, shifts, window - 1)
        embeddings = self.embed(batch.gather([d.token_ids for d in documents]))
        cos, sin = self.parts.rotary(batch.gather([d.positions for d in documents]).to(self.device))
        self_attend = partial(batch.attend, partial(attend, window=window))

        def cross_attend(queries: torch.Tensor) -> torch.Tensor:
            out = []
            for q, document, shift in zip(queries.split(batch.num_labels, 1), documents, shifts, strict=True):
                # attend takes queries of the last positions of k. The last token has no label, and so no query.
                k, v = (x[:, :-1].to(q.device) for x in (document.keys, document.values))
                out.append(attend(q, k, v, shift))
            return torch.cat(out, 1)

        label_indices = batch.label_indices.to(self.device)
        # None: the block has no second input.
        hidden = self.run_layer(self.block, embeddings, None, cos, sin, [self_attend], label_indices, cross_attend)
        labels_of_shift = zip(shifts, batch.num_labels, strict=True)
        depths = torch.cat([torch.full((n,), shift, device=self.device) for shift, n in labels_of_shift])
        return self.compute_loss(self.block.norm(hidden), self.target_head, self.make_labels(batch), depths)


def train_longspec(config: LongSpecConfig, progress: Progress = no_progress, stop: Stop = never_stop) -> Reports:
    """Trains a LongSpec draft (section 3.2, appendix E); see :mod:`longdraft.training.session`.

    A draft in ``config.init`` keeps its sizes and vocabulary; its ``window`` may change.
    """
    session = TrainingSession(config, levels=config.noise, progress=progress, stop=stop)
    check_rotary(session.runner)
    if config.init is None:
        shape = LongSpecShape(**session.draft_sizes(), window=config.window, final_norm=config.final_norm)
        block = LongSpecBlock(shape)
        block.initialize(config.seed)
        draft_to_target = session.vocabulary()
    else:
        init = LongSpecDraft.load(config.init)
        init.check(session.runner)
        block, draft_to_target = init.trainable_module(), init.draft_to_target_ids
        if "window" in config.fields_set:
            block.shape = replace(block.shape, window=config.window)
    trainer = LongSpecTrainer(block, session.runner.shared_parts, draft_to_target, config)
    trained = {"trained_length": config.max_length, "trained_positions": config.max_length + config.anchor_offset}
    draft_config = asdict(block.shape) | trained
    yield from TrainingLoop(session, trainer, (), KIND, draft_config, levels=config.noise, max_shift=config.noise).run()
