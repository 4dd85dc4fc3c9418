"""Training of LongSpec drafts: the step with its loss (:class:`LongSpecTrainee`), and the run (:func:`train_longspec`).

LongSpec, section 3.2, flash noisy training. Row t reads token t and predicts token t + 1. Self-attention sees the last
``window`` rows of the text. Cross-attention sees the target's last-layer KV up to position t - j, where the shift j is
one of 1 .. ``noise``: a node at level j of a drafted tree has its newest verified key just there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from longdraft.drafters.longspec import KIND, LongSpecBlock, LongSpecDraft, LongSpecShape, check_rotary
from longdraft.training.attention import attend
from longdraft.training.config import TrainConfig
from longdraft.training.features import Features
from longdraft.training.loop import Loop, Report
from longdraft.training.session import Progress, Session, Stop, never, silent
from longdraft.training.trainee import StepOutput, Trainee


class LongSpecTrainee(Trainee):
    """A training step of a LongSpec block."""

    block: LongSpecBlock
    by = "shift"

    def learned(self, tokens: int, start: int, shift: int) -> int:
        """The number of learned rows; a row before ``shift`` has no key that far back."""
        return tokens - 1 - max(start - 1, shift)

    def forward(self, documents: Sequence[Features], shifts: Sequence[int]) -> StepOutput:
        """The loss of packed documents, each with its shift j. ``depths`` of the result are the shifts."""
        window = self.block.shape.window
        pack = self.pack(documents, shifts, window - 1)
        x = self.embed(pack.rows([d.tokens for d in documents]))
        cos, sin = self.parts.rotary(pack.rows([d.positions for d in documents]).to(self.device))
        self_attend = partial(pack.attend, partial(attend, window=window))

        def cross_attend(q: torch.Tensor) -> torch.Tensor:
            # The row after the last learned one has KV too, which no learned row may see.
            each = zip(q.split(pack.counts, 1), documents, shifts, strict=True)
            out = [attend(q, d.keys[:, :-1].to(q.device), d.values[:, :-1].to(q.device), j) for q, d, j in each]
            return torch.cat(out, 1)

        learned = pack.learned.to(self.device)
        hidden = self.block.norm(self.layer(self.block, x, None, cos, sin, [self_attend], learned, cross_attend))
        each = zip(shifts, pack.counts, strict=True)
        depths = torch.cat([torch.full((count,), shift, device=self.device) for shift, count in each])
        return self.output(hidden, self.target_head, self.labels(pack), depths)


def train_longspec(config: TrainConfig, progress: Progress = silent, stop: Stop = never) -> Iterator[Report]:
    """Trains a LongSpec draft (section 3.2, appendix E); see :mod:`longdraft.training.session`.

    The draft in ``config.init`` keeps its sizes and its vocabulary; the window may be set anew.
    """
    session = Session(config, config.noise, progress, stop)
    check_rotary(session.runner)
    if config.init is None:
        block = LongSpecBlock(LongSpecShape(**session.sizes(), window=config.window, final_norm=config.final_norm))
        block.initialise(config.seed)
        kept = session.vocabulary()
    else:
        init = LongSpecDraft.load(config.init)
        init.check(session.runner)
        block, kept = init.trainable(), init.ids
        if "window" in config.fields_set:
            block.shape = replace(block.shape, window=config.window)
    trainee = LongSpecTrainee(block, session.runner.parts, kept, config)
    lengths = {"trained_length": config.max_length, "trained_positions": config.max_length + config.anchor_offset}
    described = asdict(block.shape) | lengths
    yield from Loop(session, trainee, (), KIND, described, levels=config.noise, shifts=config.noise).run()
