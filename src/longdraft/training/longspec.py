"""How a LongSpec draft is trained: a step, from a few documents' features to the loss of one block, and a whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from longdraft.drafters.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.drafters.longspec_draft import KIND, LongSpecDraft, check_rotary
from longdraft.model.parts import SharedParts
from longdraft.training import liger
from longdraft.training.config import TrainConfig
from longdraft.training.features import Features
from longdraft.training.measure import by_shift
from longdraft.training.noisy_attention import noisy, windowed
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, Session, begin, never, silent
from longdraft.training.trainee import StepOutput, Trainee


class LongSpecTrainee(Trainee):
    """The block with what it borrows from the target. The block alone has parameters.

    Args:
        kept, distill, head_dtype: as :class:`~longdraft.training.trainee.Trainee` takes them.
    """

    def __init__(
        self,
        block: LongSpecBlock,
        parts: SharedParts,
        kept: torch.Tensor | None = None,
        distill: float = 0.0,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(parts, kept, distill, head_dtype)
        self.block = block
        self._head = self.borrowed_head()

    def learned(self, tokens: int, start: int, shift: int) -> int:
        """Earlier rows have no key that far back."""
        return tokens - 1 - max(start - 1, shift)

    def forward(self, documents: Sequence[Features], shifts: Sequence[int]) -> StepOutput:
        """The loss of a packed batch: documents lie end to end, and none sees another.

        Args:
            shifts: j of each document (flash noisy training): cross-attention's newest key lies j positions back.

        Returns:
            ``depths`` are the shifts.
        """
        window = self.block.shape.window
        inputs, positions, rows, depths = [], [], [], []
        firsts: list[int] = []
        input_rows: list[int] = []
        query_rows: list[int] = []
        for d, shift in zip(documents, shifts, strict=True):
            first, end = self.bounds(d, shift)
            low = max(0, first - window + 1)
            inputs.append(d.tokens[low:end])
            positions.append(d.positions[low:end])
            rows.append(torch.arange(first - low, end - low) + sum(input_rows))
            depths.append(torch.full((end - first,), shift))
            firsts.append(first)
            input_rows.append(end - low)
            query_rows.append(end - first)
        device = self._head.device
        with torch.no_grad():
            x = self._parts.embedding(torch.cat(inputs).to(device)).float()
        cos, sin = self._parts.rotary(torch.cat(positions).to(device))

        # Split, never sliced: the gradient of a slice is as large as what it was cut from.
        def self_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            each = zip(q.split(query_rows, 1), k.split(input_rows, 1), v.split(input_rows, 1), strict=True)
            return torch.cat([windowed(*qkv, window) for qkv in each], 1)

        def cross_attend(q: torch.Tensor) -> torch.Tensor:
            # The row behind the last learned one has its KV too, and nobody may see it.
            each = zip(q.split(query_rows, 1), documents, shifts, strict=True)
            out = [noisy(q, d.keys[:, :-1].to(device), d.values[:, :-1].to(device), j) for q, d, j in each]
            return torch.cat(out, 1)

        hidden = self.block(x, cos, sin, self_attend, cross_attend, torch.cat(rows).to(device))
        said, levels = self.said(documents, firsts), torch.cat(depths).to(device)
        if self.training and self.distill == 0 and (fused := liger.cross_entropy(device)) is not None:
            return StepOutput(fused(hidden, self._head, said.text), None, levels)
        return self.output(hidden, self._head, said, levels)


def train_longspec(
    config: TrainConfig, progress: Progress = silent, stop: Callable[[], bool] = never
) -> Iterator[Report]:
    """Trains a LongSpec draft (LongSpec, section 3.2 and appendix E), as :mod:`longdraft.training.session` says."""
    session = begin(config, config.noise, progress, stop)
    runner = session.runner
    check_rotary(runner)
    block, kept = _draft(config, session)
    trainee = LongSpecTrainee(block, runner.parts, kept, config.distill, session.product_dtype)
    reader = session.reader()
    if (source := session.source(reader)) is None:
        return
    lengths = {"trained_length": config.max_length, "trained_positions": config.max_length + config.anchor_offset}
    described = block.shape.as_dict() | lengths
    yield from session.train(
        trainee, reader, source, KIND, described, levels=config.noise, ranks_of=by_shift, shifts=config.noise
    )


def _draft(config: TrainConfig, session: Session) -> tuple[LongSpecBlock, torch.Tensor | None]:
    """The block to train and the target ids of its vocabulary: a new one, or the one in ``config.init``.

    A draft that is trained further keeps its sizes and its vocabulary; the window may be set anew.
    """
    runner = session.runner
    if config.init is None:
        parts, kv = runner.parts, runner.kv_shape
        shape = LongSpecShape(
            parts.hidden_size,
            config.intermediate_size or parts.intermediate_size,
            parts.heads,
            kv.kv_heads,
            kv.head_dim,
            parts.rms_norm_eps,
            config.window,
            config.final_norm,
        )
        block = LongSpecBlock(shape)
        block.initialise(config.seed)
        return block, session.vocabulary()
    init = LongSpecDraft.load(config.init)
    init.check(runner)
    block = init.trainable()
    if "window" in config.fields_set:
        block.shape = replace(block.shape, window=config.window)
    return block, init.ids
