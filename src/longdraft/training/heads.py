"""How chained heads are trained: a step, from a few documents' features to the loss of all heads, and a whole run.

Row t holds the target's hidden state of token t before the final norm, by which the target itself says token t+1; head
i says token t+1+i. The target is not trained, and no head sees a token that comes after t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from longdraft.drafters.heads_block import HeadsBlock, HeadsShape
from longdraft.drafters.heads_draft import KIND, HeadsDraft
from longdraft.model.parts import SharedParts, final_norm
from longdraft.training.config import HeadsConfig
from longdraft.training.features import Features
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, begin, never, silent
from longdraft.training.trainee import StepOutput, Trainee


class HeadsTrainee(Trainee):
    """The heads with what they borrow from the target. They alone have parameters.

    Args:
        decay: weight of a head, against the one before.
        kept, distill, head_dtype: as :class:`~longdraft.training.trainee.Trainee` takes them.
    """

    ahead = 2  # the token after the row's is the root, which the target says itself

    def __init__(
        self,
        block: HeadsBlock,
        parts: SharedParts,
        kept: torch.Tensor | None = None,
        decay: float = 1.0,
        distill: float = 0.0,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(parts, kept, distill, head_dtype)
        self.block, self.decay = block, decay
        self._head = self.borrowed_head()

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), levels: int | None = None
    ) -> StepOutput:
        """The loss of a packed batch, summed over rows and, with their weights, over heads.

        Args:
            shifts: not used: every row goes through every head.
            levels: as many as there are heads, for measuring.

        Returns:
            ``depths`` are 1 for the first head, and so on.
        """
        device = self._head.device
        bounds = [self.bounds(d) for d in documents]
        sizes = list(accumulate((end - first for first, end in bounds), initial=0))
        states = [d.hidden[first:end] for d, (first, end) in zip(documents, bounds, strict=True)]
        # Head i + 1 of the rows that have a token so far behind them.
        rows = [
            torch.cat([torch.arange(a, max(a, b - i)) for a, b in pairwise(sizes)])
            for i in range(self.block.shape.heads)
        ]
        said = self.said(documents, [first for first, _ in bounds])
        # Float32: sums of the residual stream are; the products are autocast's.
        out = self.block(torch.cat(states).to(device).float())
        hidden = torch.cat([states[row.to(device)] for states, row in zip(out, rows, strict=True)])
        # Head i + 1 of row r says what head 1 of row r + i does.
        at = torch.cat([row + i for i, row in enumerate(rows)]).to(device)
        depths = torch.cat([torch.full_like(row, i + 1) for i, row in enumerate(rows)]).to(device)
        return self.output(hidden, self._head, said.at(at), depths, (self.decay ** (depths - 1))[:, None])


def train_heads(config: HeadsConfig, progress: Progress = silent, stop: Callable[[], bool] = never) -> Iterator[Report]:
    """Trains chained heads on a target that stays as it is, as :mod:`longdraft.training.session` says."""
    init = None if config.init is None else HeadsDraft.load(config.init)
    heads = config.heads if init is None else init.shape.heads
    session = begin(config, heads, progress, stop)
    runner = session.runner
    if init is None:
        kept = session.vocabulary()
        first_norm = final_norm(runner.model).cpu()  # a target without one is refused before it reads anything
    else:
        kept = init.ids
        init.check(runner)
    reader = session.reader((runner.kv_shape.layers - 1,))
    if (source := session.source(reader)) is None:
        return
    if init is None:
        block = HeadsBlock(HeadsShape(runner.parts.hidden_size, heads, runner.parts.rms_norm_eps))
        # The median: the first token's states can be a thousand times the others'.
        block.initialise(first_norm, float(source[0].hidden.cpu().float().square().mean(-1).sqrt().median()))
    else:
        block = init.trainable()
    trainee = HeadsTrainee(block, runner.parts, kept, config.decay, config.distill, session.product_dtype)
    described = block.shape.as_dict() | {"trained_length": config.max_length}
    yield from session.train(trainee, reader, source, KIND, described, levels=heads, measured=heads)
