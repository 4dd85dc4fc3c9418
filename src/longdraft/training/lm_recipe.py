"""A whole run that distils a small language model, from its configuration to the draft folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longdraft.drafters import draft_folder
from longdraft.drafters.draft_folder import DraftFolder
from longdraft.drafters.small_lm_draft import KIND, OFFSETS, TrainedLM
from longdraft.target import small_models
from longdraft.training import corpus
from longdraft.training.config import LmConfig
from longdraft.training.documents import Document
from longdraft.training.lm import LmTrainee
from longdraft.training.longspec import StepOutput
from longdraft.training.measure import Simulated, by_text, simulate
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, Session, begin
from longdraft.training.trainer import Trainer
from longdraft.training.vocabulary import offsets


def train_lm(
    config: LmConfig,
    progress: Progress = lambda what, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Report]:
    """Distils a small Llama from the target, on short text; resumes where ``config.out`` holds a run.

    The draft with the best simulated acceptance is in ``out/best``, the last one in ``out/last``. Started by torchrun
    or ``accelerate launch``, every process calls this.

    Args:
        progress: told what is being prepared, how much is done, and of how much (0: not known).
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
    data = session.data
    trainee = LmTrainee(decoder, runner.parts, kept, config.distill, session.product_dtype).to(runner.device)
    reader = session.reader(None)
    source = session.source(reader)
    if source is None:
        return
    held_out = session.held_out(reader)
    rows = [len(d.tokens) - d.start for d in data.learned]

    def measure(module: Callable[..., StepOutput]) -> Simulated:
        return simulate(module, held_out, ranks_of=by_text)

    def save_draft(weights: Mapping[str, torch.Tensor], name: str) -> None:
        own = {n.removeprefix("decoder."): t for n, t in weights.items()}
        draft = as_folder(own, sizes, kept, runner.parts.description, config)
        draft_folder.save(Path(config.out) / name, draft)

    trainer = Trainer(
        config,
        session.accelerator,
        trainee,
        source,
        rows,
        lambda i, shift: rows[i],
        corpus.digest(data.learned),
        measure if held_out else None,
        save_draft,
        shifts=1,
        levels=1,
    )
    yield from trainer.run(stop)


def as_folder(
    weights: Mapping[str, torch.Tensor],
    sizes: dict[str, Any],
    kept: torch.Tensor | None,
    target: dict[str, Any],
    config: LmConfig,
) -> DraftFolder:
    """The draft as its folder holds it: bfloat16 weights, and the table of its vocabulary.

    Args:
        sizes: of the decoder, as transformers names them.
    """
    tensors = {name: t.to(torch.bfloat16) for name, t in weights.items()}
    if kept is not None:
        tensors[OFFSETS] = offsets(kept)
    described = {
        "model": sizes,
        "draft_vocab_size": None if kept is None else len(kept),
        "trained_length": config.max_length,
    }
    if config.retrieval_layer is not None:
        described["retrieval_layer"] = config.retrieval_layer
    return DraftFolder(KIND, described, tensors, target)


def _whole(document: Document, max_length: int) -> Document:
    """The document, learned from its second token on where it was not cut."""
    return Document(document.tokens) if len(document.tokens) < max_length else document


def _draft(config: LmConfig, session: Session) -> tuple[nn.Module, dict[str, Any], torch.Tensor | None]:
    """The decoder to train, its sizes, and the target ids of its vocabulary: new, or as in ``config.init``."""
    runner = session.runner
    if config.init is not None:
        init = TrainedLM(config.init, draft_folder.load(config.init))
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
