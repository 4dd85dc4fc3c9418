"""How a small language model that drafts is distilled: a step, from a few documents' features to its loss, and a run.

It is trained as any language model, on text that is short on purpose: while drafting it sees as much at once and no
more (SpecExtend keeps the keys that matter and rotates them to the positions of a short text, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from longdraft.drafters.small_lm_draft import KIND, TrainedLM
from longdraft.model import small_models
from longdraft.model.parts import SharedParts
from longdraft.training.config import LmConfig
from longdraft.training.features import Features
from longdraft.training.measure import by_text
from longdraft.training.noisy_attention import causal
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, Session, begin, never, silent
from longdraft.training.trainee import StepOutput, Trainee
from longdraft.training.vocabulary import rows_of


class LmTrainee(Trainee):
    """The decoder with what it borrows from the target. The decoder alone has parameters.

    Args:
        decoder: as :func:`longdraft.model.small_models.decoder` makes it.
        kept, distill, head_dtype: as :class:`~longdraft.training.trainee.Trainee` takes them.
    """

    def __init__(
        self,
        decoder: nn.Module,
        parts: SharedParts,
        kept: torch.Tensor | None = None,
        distill: float = 0.8,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(parts, kept, distill, head_dtype)
        self.decoder = decoder
        self._head = self.borrowed_head()

    def forward(self, documents: Sequence[Features], shifts: Sequence[int] = ()) -> StepOutput:
        """The loss of a packed batch: documents lie end to end, and none sees another.

        Args:
            shifts: not used.
        """
        lengths = [len(d.tokens) - 1 for d in documents]  # the last token predicts nothing
        firsts = [d.start - 1 for d in documents]
        device = self._head.device
        each = zip(accumulate(lengths, initial=0), firsts, lengths, strict=False)
        rows = torch.cat([torch.arange(at + first, at + length) for at, first, length in each]).to(device)
        with torch.no_grad():
            x = self._parts.embedding(torch.cat([d.tokens[:-1] for d in documents]).to(device)).float()
        said = self.said(documents, firsts)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)

        # Split, never sliced: the gradient of a slice is as large as what it was cut from.
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            parts = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)
            return torch.cat([causal(*qkv) for qkv in parts], 1)

        hidden = small_models.hidden_states(self.decoder, x, positions, attend)[rows]
        return self.output(hidden, self._head, said, torch.ones_like(said.text))


def train_lm(config: LmConfig, progress: Progress = silent, stop: Callable[[], bool] = never) -> Iterator[Report]:
    """Distils a small Llama from the target, on short text, as :mod:`longdraft.training.session` says."""
    session = begin(config, 0, progress, stop, keep_end=True)
    runner = session.runner
    decoder, sizes, kept = _draft(config, session)
    if config.learn_prompts:  # every document that was not cut, from its second token on
        length = min(config.max_length, runner.context_length)
        learned = [replace(d, start=1) if len(d.tokens) < length else d for d in session.data.learned]
        session = replace(session, data=replace(session.data, learned=learned))
    trainee = LmTrainee(decoder, runner.parts, kept, config.distill, session.product_dtype)
    reader = session.reader(None)
    if (source := session.source(reader)) is None:
        return
    described = {"model": sizes, "trained_length": config.max_length}
    if config.retrieval_layer is not None:
        described["retrieval_layer"] = config.retrieval_layer
    yield from session.train(trainee, reader, source, KIND, described, levels=1, ranks_of=by_text)


def _draft(config: LmConfig, session: Session) -> tuple[nn.Module, dict[str, Any], torch.Tensor | None]:
    """The decoder to train, its sizes, and the target ids of its vocabulary: new, or as in ``config.init``."""
    runner = session.runner
    if config.init is not None:
        init = TrainedLM.load(config.init)
        init.check(runner)
        return init.trainable(), init.sizes | {"max_position_embeddings": config.max_length}, init.ids
    sizes = small_models.sizes_for(
        runner, config.layers, config.intermediate_size, config.rope_theta, config.max_length
    )
    decoder, kept = small_models.decoder(sizes), session.vocabulary()
    if config.start_from is not None:
        small_models.take_layers(decoder, runner, config.start_from)
    else:
        small_models.initialise(decoder, config.seed, rows_of(runner.parts.head, kept).cpu())
    return decoder, sizes, kept
