"""A whole run that trains chained heads, from its configuration to the draft folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from longdraft.drafters import draft_folder
from longdraft.drafters.draft_folder import DraftFolder
from longdraft.drafters.heads_block import HeadsBlock, HeadsShape
from longdraft.drafters.heads_draft import KIND, OFFSETS, HeadsDraft
from longdraft.target.parts import final_norm
from longdraft.training import corpus
from longdraft.training.config import HeadsConfig
from longdraft.training.heads import HeadsTrainee
from longdraft.training.longspec import StepOutput
from longdraft.training.measure import Simulated, by_step, simulate
from longdraft.training.run_log import Report
from longdraft.training.session import Progress, begin
from longdraft.training.trainer import Trainer
from longdraft.training.vocabulary import offsets


def train_heads(
    config: HeadsConfig,
    progress: Progress = lambda what, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Report]:
    """Trains chained heads on a target that stays as it is; resumes where ``config.out`` holds a run.

    The heads with the best simulated acceptance are in ``out/best``, the last ones in ``out/last``. Started by torchrun
    or ``accelerate launch``, every process calls this.

    Args:
        progress: told what is being prepared, how much is done, and of how much (0: not known).
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
    runner, data = session.runner, session.data
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
    held_out = session.held_out(reader)
    shape = block.shape
    trainee = HeadsTrainee(block, runner.parts, kept, config.decay, config.distill, session.product_dtype)

    def count(i: int, shift: int) -> int:
        return len(data.learned[i].tokens) - 1 - data.learned[i].start

    def measure(module: Callable[..., StepOutput]) -> Simulated:
        return simulate(module, held_out, heads, ranks_of=by_step)

    def save_draft(weights: Mapping[str, torch.Tensor], name: str) -> None:
        own = {n.removeprefix("block."): t for n, t in weights.items()}
        draft_folder.save(Path(config.out) / name, as_folder(own, shape, kept, runner.parts.description, config))

    trainer = Trainer(
        config,
        session.accelerator,
        trainee.to(runner.device),
        source,
        [count(i, 1) for i in range(len(data.learned))],
        count,
        corpus.digest(data.learned),
        measure if held_out else None,
        save_draft,
        shifts=1,
        levels=heads,
    )
    yield from trainer.run(stop)


def as_folder(
    weights: Mapping[str, torch.Tensor],
    shape: HeadsShape,
    kept: torch.Tensor | None,
    target: dict[str, Any],
    config: HeadsConfig,
) -> DraftFolder:
    """The heads as their folder holds them: bfloat16 weights, and the table of their vocabulary."""
    tensors = {name: t.to(torch.bfloat16) for name, t in weights.items()}
    if kept is not None:
        tensors[OFFSETS] = offsets(kept)
    described = shape.as_dict() | {
        "draft_vocab_size": None if kept is None else len(kept),
        "trained_length": config.max_length,
    }
    return DraftFolder(KIND, described, tensors, target)
