"""A whole run that distils a small language model, from its configuration to the draft folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from longdraft.drafters.draft_folder import DraftFolder, trained
from longdraft.drafters.small_lm_draft import KIND, TrainedLM
from longdraft.host import small_models
from longdraft.training.config import LmConfig
from longdraft.training.documents import Document
from longdraft.training.lm import LmTrainee
from longdraft.training.measure import by_text
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, Session, begin


def train_lm(
    config: LmConfig,
    progress: Progress = lambda what, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Report]:
    """Distils a small Llama from the target, on short text; resumes where ``config.out`` holds a run.

    See :meth:`longdraft.training.session.Session.train`.

    Args:
        stop: asked after each step, and while the target reads; True writes a checkpoint and ends.

    Raises:
        LongdraftError: bad data, no room on disk, a draft or a checkpoint of something else, a target that takes no
            drafts.
    """
    session = begin(config, 0, progress, stop, keep_end=True)
    runner = session.runner
    decoder, sizes, kept = _draft(config, session)
    if config.learn_prompts:
        length = min(config.max_length, runner.context_length)
        learned = [_whole(d, length) for d in session.data.learned]
        session = replace(session, data=replace(session.data, learned=learned))
    trainee = LmTrainee(decoder, runner.parts, kept, config.distill, session.product_dtype)
    reader = session.reader(None)
    source = session.source(reader)
    if source is None:
        return

    def made(weights: Mapping[str, torch.Tensor]) -> DraftFolder:
        described = {"model": sizes, "trained_length": config.max_length}
        if config.retrieval_layer is not None:
            described["retrieval_layer"] = config.retrieval_layer
        return trained(KIND, described, weights, kept, runner.parts.description)

    def rows(document: Document) -> int:
        return len(document.tokens) - document.start

    yield from session.train(
        trainee,
        reader,
        source,
        made,
        levels=1,
        ranks_of=by_text,
        rows=rows,
        count=lambda document, shift: rows(document),
    )


def _whole(document: Document, max_length: int) -> Document:
    """The document, learned from its second token on where it was not cut."""
    return Document(document.tokens) if len(document.tokens) < max_length else document


def _draft(config: LmConfig, session: Session) -> tuple[nn.Module, dict[str, Any], torch.Tensor | None]:
    """The decoder to train, its sizes, and the target ids of its vocabulary: new, or as in ``config.init``."""
    runner = session.runner
    if config.init is not None:
        init = TrainedLM.load(config.init)
        init.check(runner)
        sizes = init.sizes | {"max_position_embeddings": config.max_length}
        decoder = small_models.decoder(sizes)
        decoder.load_state_dict({name: t.float() for name, t in init.weights.items()})
        return decoder, sizes, init.ids
    sizes = small_models.sizes_for(
        runner, config.layers, config.intermediate_size, config.rope_theta, config.max_length
    )
    decoder, kept = small_models.decoder(sizes), session.vocabulary()
    if config.start_from is not None:
        small_models.take_layers(decoder, runner, config.start_from)
    else:
        head = runner.parts.head
        small_models.initialise(decoder, config.seed, (head if kept is None else head[kept.to(head.device)]).cpu())
    return decoder, sizes, kept
