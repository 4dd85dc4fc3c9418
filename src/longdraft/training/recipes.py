"""A whole LongSpec training run, from its configuration to the draft folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from longdraft.drafters import draft_folder
from longdraft.drafters.draft_folder import DraftFolder
from longdraft.drafters.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.drafters.longspec_draft import OFFSETS, LongSpecDraft
from longdraft.errors import UnsupportedModelError
from longdraft.target.runner import TargetRunner
from longdraft.training import corpus
from longdraft.training.config import TrainConfig
from longdraft.training.longspec import LongSpecTrainee, StepOutput
from longdraft.training.measure import Simulated, simulate
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, Session, begin
from longdraft.training.trainer import Trainer
from longdraft.training.vocabulary import offsets


def train_longspec(
    config: TrainConfig,
    progress: Progress = lambda what, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Report]:
    """Trains a LongSpec draft (LongSpec, section 3.2 and appendix E); resumes where ``config.out`` holds a run.

    The draft with the best simulated acceptance is in ``out/best``, the last one in ``out/last``. Started by torchrun
    or ``accelerate launch``, every process calls this.

    Args:
        progress: told what is being prepared, how much is done, and of how much (0: not known).
        stop: asked after each step, and while the target reads; True writes a checkpoint and ends.

    Raises:
        LongdraftError: bad data, no room on disk, a draft or a checkpoint of something else, a target that takes no
            drafts.
    """
    session = begin(config, config.noise, progress, stop)
    runner, data = session.runner, session.data
    _check_rotary(runner)
    block, kept = _draft(config, session)
    trainee = LongSpecTrainee(block, runner.parts, kept, config.distill, session.product_dtype).to(runner.device)
    reader = session.reader()
    source = session.source(reader)
    if source is None:
        return
    held_out = session.held_out(reader)

    def count(i: int, shift: int) -> int:
        document = data.learned[i]
        return len(document.tokens) - 1 - max(document.start - 1, shift)

    def measure(module: Callable[..., StepOutput]) -> Simulated:
        return simulate(module, held_out)

    def save_draft(weights: Mapping[str, torch.Tensor], name: str) -> None:
        own = {n.removeprefix("block."): t for n, t in weights.items()}
        draft = as_folder(own, block.shape, kept, runner.parts.description, config)
        draft_folder.save(Path(config.out) / name, draft)

    trainer = Trainer(
        config,
        session.accelerator,
        trainee,
        source,
        [len(d.tokens) - d.start for d in data.learned],
        count,
        corpus.digest(data.learned),
        measure if held_out else None,
        save_draft,
        shifts=config.noise,
        levels=config.noise,
    )
    yield from trainer.run(stop)


def as_folder(
    weights: Mapping[str, torch.Tensor],
    shape: LongSpecShape,
    kept: torch.Tensor | None,
    target: dict[str, Any],
    config: TrainConfig,
) -> DraftFolder:
    """The draft as its folder holds it: bfloat16 weights, and the table of its vocabulary."""
    tensors = {name: t.to(torch.bfloat16) for name, t in weights.items()}
    if kept is not None:
        tensors[OFFSETS] = offsets(kept)
    described = shape.as_dict() | {
        "draft_vocab_size": None if kept is None else len(kept),
        "trained_length": config.max_length,
        "trained_positions": config.max_length + config.anchor_offset,
    }
    return DraftFolder("longspec", described, tensors, target)


def _check_rotary(runner: TargetRunner) -> None:
    """Raises UnsupportedModelError for a target whose rotary embedding (or head) a draft cannot share."""
    cos, _ = runner.parts.rotary(torch.zeros(1, dtype=torch.long, device=runner.device))
    if cos.shape[-1] != runner.kv_shape.head_dim:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} rotates {cos.shape[-1]} of {runner.kv_shape.head_dim} dimensions of a "
            "head; LongSpec drafts share rotary embeddings of whole heads only."
        )


def _draft(config: TrainConfig, session: Session) -> tuple[LongSpecBlock, torch.Tensor | None]:
    """The block to train and the target ids of its vocabulary: a new one, or the one in ``config.init``.

    A draft that is trained further keeps its sizes and its vocabulary; the window may be set anew.
    """
    runner = session.runner
    if config.init is None:
        parts, kv = runner.parts, runner.kv_shape
        width = config.intermediate_size or parts.intermediate_size
        shape = LongSpecShape(
            parts.hidden_size,
            width,
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
    contents = draft_folder.load(config.init)
    init = LongSpecDraft(config.init, contents)
    init.check(runner)
    window = config.window if "window" in config.fields_set else init.shape.window
    block = LongSpecBlock(LongSpecShape(**init.shape.as_dict() | {"window": window}))
    block.load_state_dict({name: contents.tensors[name].float() for name in block.state_dict()})
    return block, init.ids
