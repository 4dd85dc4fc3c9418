"""A whole run that trains chained heads, from its configuration to the draft folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from longdraft.drafters.draft_folder import DraftFolder, trained
from longdraft.drafters.heads_block import HeadsBlock, HeadsShape
from longdraft.drafters.heads_draft import KIND, HeadsDraft
from longdraft.host.parts import final_norm
from longdraft.training.config import HeadsConfig
from longdraft.training.heads import HeadsTrainee
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, begin


def train_heads(
    config: HeadsConfig,
    progress: Progress = lambda what, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Report]:
    """Trains chained heads on a target that stays as it is; resumes where ``config.out`` holds a run.

    See :meth:`longdraft.training.session.Session.train`.

    Args:
        stop: asked after each step, and while the target reads; True writes a checkpoint and ends.

    Raises:
        LongdraftError: bad data, no room on disk, a draft or a checkpoint of something else, a target that takes no
            drafts.
    """
    block, kept = None, None
    if config.init is not None:
        init = HeadsDraft.load(config.init)
        block, kept = HeadsBlock(init.shape), init.ids
        block.load_state_dict({name: t.float() for name, t in init.weights.items()})
    heads = config.heads if block is None else block.shape.heads
    session = begin(config, heads, progress, stop)
    runner = session.runner
    if block is None:
        kept = session.vocabulary()
        first_norm = final_norm(runner.model).cpu()  # a target without one is refused before it reads anything
    else:
        init.check(runner)
    reader = session.reader((runner.kv_shape.layers - 1,))
    source = session.source(reader)
    if source is None:
        return
    if block is None:
        block = HeadsBlock(HeadsShape(runner.parts.hidden_size, heads, runner.parts.rms_norm_eps))
        # The median: the first token's states can be a thousand times the others'.
        block.initialise(first_norm, float(source[0].hidden.cpu().float().square().mean(-1).sqrt().median()))
    shape = block.shape
    trainee = HeadsTrainee(block, runner.parts, kept, config.decay, config.distill, session.product_dtype)

    def made(weights: Mapping[str, torch.Tensor]) -> DraftFolder:
        described = shape.as_dict() | {"trained_length": config.max_length}
        return trained(KIND, described, weights, kept, runner.parts.description)

    yield from session.train(trainee, reader, source, made, levels=heads, measured=heads)
