"""A whole LongSpec training run, from its configuration to the draft folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from longdraft.drafters.draft_folder import DraftFolder, trained
from longdraft.drafters.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.drafters.longspec_draft import KIND, LongSpecDraft
from longdraft.errors import UnsupportedModelError
from longdraft.host.runner import TargetRunner
from longdraft.training.config import TrainConfig
from longdraft.training.longspec import LongSpecTrainee
from longdraft.training.measure import by_shift
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, Session, begin


def train_longspec(
    config: TrainConfig,
    progress: Progress = lambda what, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Report]:
    """Trains a LongSpec draft (LongSpec, section 3.2 and appendix E); resumes where ``config.out`` holds a run.

    See :meth:`longdraft.training.session.Session.train`.

    Args:
        stop: asked after each step, and while the target reads; True writes a checkpoint and ends.

    Raises:
        LongdraftError: bad data, no room on disk, a draft or a checkpoint of something else, a target that takes no
            drafts.
    """
    session = begin(config, config.noise, progress, stop)
    runner = session.runner
    _check_rotary(runner)
    block, kept = _draft(config, session)
    trainee = LongSpecTrainee(block, runner.parts, kept, config.distill, session.product_dtype)
    reader = session.reader()
    source = session.source(reader)
    if source is None:
        return

    def made(weights: Mapping[str, torch.Tensor]) -> DraftFolder:
        lengths = {
            "trained_length": config.max_length,
            "trained_positions": config.max_length + config.anchor_offset,
        }
        return trained(KIND, block.shape.as_dict() | lengths, weights, kept, runner.parts.description)

    yield from session.train(
        trainee,
        reader,
        source,
        made,
        levels=config.noise,
        shifts=config.noise,
        ranks_of=by_shift,
        rows=lambda document: len(document.tokens) - document.start,
        count=lambda document, shift: len(document.tokens) - 1 - max(document.start - 1, shift),
    )


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
    init = LongSpecDraft.load(config.init)
    init.check(runner)
    window = config.window if "window" in config.fields_set else init.shape.window
    block = LongSpecBlock(LongSpecShape(**init.shape.as_dict() | {"window": window}))
    block.load_state_dict({name: t.float() for name, t in init.weights.items()})
    return block, init.ids
