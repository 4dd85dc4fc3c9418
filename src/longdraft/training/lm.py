"""Trains small language models as drafts: the step with its loss (:class:`LmTrainer`), and the run (:func:`train_lm`).

The input at position t is token t, the label is token t + 1. Documents are short, because the draft never sees a long
context: in drafting, SpecExtend (section 3) selects chunks and rotates their keys to the positions of a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from longdraft.drafts import small_llama
from longdraft.drafts.language_model import KIND, TrainedLM
from longdraft.training.attention import attend
from longdraft.training.config import LmConfig
from longdraft.training.features import Features, head_rows
from longdraft.training.loop import Reports, TrainingLoop
from longdraft.training.session import Progress, Stop, TrainingSession, never_stop, no_progress
from longdraft.training.trainer import DraftTrainer, StepOutput


class LmTrainer(DraftTrainer):
    """A training step of a decoder made by :func:`longdraft.drafts.small_llama.build_decoder`."""

    level_mode = "text"

    def forward(self, documents: Sequence[Features], shifts: Sequence[int] = ()) -> StepOutput:
        """Returns the loss of packed documents. ``shifts`` are not used; all ``depths`` of the result are 1."""
        batch = self.pack(documents)
        embeddings = self.embed(batch.gather([d.token_ids for d in documents]))
        positions = batch.gather([d.positions for d in documents]).to(self.device)
        attention = partial(batch.attend, attend)
        hidden = self.run_layer(small_llama.hidden_states, self.block, embeddings, positions, attention)
        labels, hidden = self.make_labels(batch), hidden[batch.label_indices.to(self.device)]
        return self.compute_loss(hidden, self.target_head, labels, torch.ones_like(labels.token_ids))


def train_lm(config: LmConfig, progress: Progress = no_progress, stop: Stop = never_stop) -> Reports:
    """Distils a small Llama from the target; see :mod:`longdraft.training.session`."""
    session = TrainingSession(config, levels=0, progress=progress, stop=stop)  # one label suffices
    runner = session.runner
    if config.init is None:
        sizes = small_llama.small_llama_config(
            runner, config.layers, config.intermediate_size, config.rope_theta, config.max_length
        )
        decoder: nn.Module = small_llama.build_decoder(sizes)
        draft_to_target = session.vocabulary()
        if config.start_from is not None:
            small_llama.copy_target_layers(decoder, runner, config.start_from)
        else:
            small_llama.initialize(decoder, config.seed, head_rows(runner.shared_parts.head, draft_to_target).cpu())
    else:
        init = TrainedLM.load(config.init)
        init.check(runner)
        sizes = init.sizes | {"max_position_embeddings": config.max_length}
        decoder, draft_to_target = init.trainable_module(), init.draft_to_target_ids
    draft_config = {"model": sizes, "trained_length": config.max_length}
    if config.retrieval_layer is not None:
        draft_config["retrieval_layer"] = config.retrieval_layer
    trainer = LmTrainer(decoder, runner.shared_parts, draft_to_target, config)
    yield from TrainingLoop(session, trainer, None, KIND, draft_config, levels=1).run()
