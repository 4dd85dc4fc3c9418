"""Training of small language models: the step with its loss (:class:`LmTrainee`), and the run (:func:`train_lm`).

Row t reads token t and predicts token t + 1. The text is short on purpose: while drafting, the model sees as little at
once (SpecExtend, section 3, keeps the keys that matter and rotates them to the positions of a short text).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from longdraft.drafts.language_model import KIND, TrainedLM
from longdraft.model import small_models
from longdraft.training.attention import attend
from longdraft.training.config import LmConfig
from longdraft.training.features import Features, rows_of
from longdraft.training.loop import Loop, Report
from longdraft.training.session import Progress, Stop, begin, never, silent
from longdraft.training.trainee import StepOutput, Trainee


class LmTrainee(Trainee):
    """A training step of a decoder that :func:`longdraft.model.small_models.decoder` has made."""

    by = "text"

    def forward(self, documents: Sequence[Features], shifts: Sequence[int] = ()) -> StepOutput:
        """The loss of packed documents. ``shifts`` are not used, and all ``depths`` of the result are 1."""
        pack = self.pack(documents)
        x = self.embed(pack.rows([d.tokens for d in documents]))
        positions = pack.rows([d.positions for d in documents]).to(self.device)
        attention = partial(pack.attend, attend)
        hidden = self.layer(small_models.hidden_states, self.block, x, positions, attention)[
            pack.learned.to(self.device)
        ]
        labels = self.labels(pack)
        return self.output(hidden, self.target_head, labels, torch.ones_like(labels.text))


def train_lm(config: LmConfig, progress: Progress = silent, stop: Stop = never) -> Iterator[Report]:
    """Distils a small Llama from the target; see :mod:`longdraft.training.session`."""
    session = begin(config, 0, progress, stop)
    runner = session.runner
    if config.init is None:
        sizes = small_models.sizes_for(
            runner, config.layers, config.intermediate_size, config.rope_theta, config.max_length
        )
        decoder: nn.Module = small_models.decoder(sizes)
        kept = session.vocabulary()
        if config.start_from is not None:
            small_models.take_layers(decoder, runner, config.start_from)
        else:
            small_models.initialise(decoder, config.seed, rows_of(runner.parts.head, kept).cpu())
    else:
        init = TrainedLM.load(config.init)
        init.check(runner)
        sizes = init.sizes | {"max_position_embeddings": config.max_length}
        decoder, kept = init.trainable(), init.ids
    described = {"model": sizes, "trained_length": config.max_length}
    if config.retrieval_layer is not None:
        described["retrieval_layer"] = config.retrieval_layer
    trainee = LmTrainee(decoder, runner.parts, kept, config)
    yield from Loop(session, trainee, None, KIND, described, levels=1).run()
