"""A whole LongSpec training run, from its configuration to the draft folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from longdraft.drafters import draft_folder
from longdraft.drafters.draft_folder import DraftFolder
from longdraft.drafters.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.drafters.longspec_draft import OFFSETS, LongSpecDraft
from longdraft.errors import UnsupportedModelError
from longdraft.target.loading import load
from longdraft.target.runner import TargetRunner
from longdraft.training import corpus
from longdraft.training.config import TrainConfig
from longdraft.training.documents import Document, Skipped, documents
from longdraft.training.feature_cache import FeatureCache
from longdraft.training.features import FeatureReader, Features
from longdraft.training.longspec import LongSpecTrainee, StepOutput
from longdraft.training.measure import Simulated, simulate
from longdraft.training.run_log import Report
from longdraft.training.trainer import FeatureSource, Trainer
from longdraft.training.vocabulary import most_frequent, offsets

# Held-out documents that a measurement takes: enough to compare, few enough to be quick.
MEASURED = 48
# The other processes wait while one converts a model or reads a shard; a hung one is the launcher's to end.
PATIENCE = timedelta(days=7)

Progress = Callable[[str, int, int], None]


class LiveFeatures:
    """Features computed as they are asked for, and forgotten: the same whatever was asked for before."""

    def __init__(self, reader: FeatureReader, texts: list[Document], shifts: list[int]) -> None:
        self.reader, self.texts, self.offsets = reader, texts, shifts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> Features:
        self.reader.forget()
        return self.reader.read(self.texts[i], self.offsets[i])


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
    if config.threads:
        torch.set_num_threads(config.threads)
    asked = config.device or ""
    if asked.startswith("cuda:") and torch.cuda.is_available():
        torch.cuda.set_device(asked)  # accelerate takes the current one
    accelerator = Accelerator(
        cpu=asked == "cpu",
        mixed_precision=config.precision,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    device = accelerator.device if accelerator.num_processes > 1 or not asked else asked
    with accelerator.main_process_first():  # the first to come converts the embedded model, or downloads
        model, tokenizer = load(
            config.target, dtype=config.target_dtype, device=device, progress=lambda line: progress(line, 0, 0)
        )
    runner = TargetRunner(model)
    _check_rotary(runner)
    skipped = Skipped()
    data = corpus.collect(
        documents([Path(p) for p in config.data], tokenizer, skipped, runner.vocab_size),
        skipped,
        max_length=min(config.max_length, runner.context_length),
        min_length=config.min_length,
        shortest_learned=config.noise,
        held_out=config.held_out,
        sample=config.sample,
    )
    progress(f"{len(data.learned):,} documents, {len(data.held_out):,} held out; left out: {skipped}", 0, 0)

    counted: Iterable[Document] = data.learned
    if config.vocabulary_from:
        counted = documents([Path(p) for p in config.vocabulary_from], tokenizer, Skipped(), runner.vocab_size)
    block, kept = _draft(config, counted, runner)
    half = config.precision == "bf16"
    trainee = LongSpecTrainee(block, runner.parts, kept, config.distill, torch.bfloat16 if half else torch.float32)
    trainee = trainee.to(runner.device)
    reader = FeatureReader(runner, config.top, torch.bfloat16 if half else runner.kv_shape.dtype)
    source = _source(config, data.learned, reader, accelerator, progress, stop)
    if source is None:
        return
    # Held-out text keeps its own positions: that is how it will be decoded.
    chosen = data.held_out[:: max(1, len(data.held_out) // MEASURED)][:MEASURED]
    held_out = [reader.read(d).on_host() for d in chosen]

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
        accelerator,
        trainee,
        source,
        [len(d.tokens) - d.start for d in data.learned],
        count,
        corpus.digest(data.learned),
        measure if held_out else None,
        save_draft,
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


def _draft(
    config: TrainConfig, counted: Iterable[Document], runner: TargetRunner
) -> tuple[LongSpecBlock, torch.Tensor | None]:
    """The block to train and the target ids of its vocabulary: a new one, or the one in ``config.init``.

    Args:
        counted: texts whose most frequent tokens a new draft's vocabulary takes.

    A draft that is trained further keeps its sizes and its vocabulary; the window may be set anew.
    """
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
        if config.vocabulary is None or config.vocabulary >= runner.vocab_size:
            return block, None
        return block, most_frequent(counted, runner.vocab_size, config.vocabulary, runner.eos_token_ids)
    contents = draft_folder.load(config.init)
    init = LongSpecDraft(config.init, contents)
    init.check(runner)
    window = config.window if "window" in config.fields_set else init.shape.window
    block = LongSpecBlock(LongSpecShape(**init.shape.as_dict() | {"window": window}))
    block.load_state_dict({name: contents.tensors[name].float() for name in block.state_dict()})
    return block, init.ids


def _source(
    config: TrainConfig,
    learned: list[Document],
    reader: FeatureReader,
    accelerator: Accelerator,
    progress: Progress,
    stop: Callable[[], bool],
) -> FeatureSource | None:
    """Where features come from; None where ``stop`` ended the filling of the cache."""
    runner = reader.runner
    shifts = corpus.offsets(learned, config.anchor_offset, runner.context_length, config.seed)
    if config.cache is None:
        return LiveFeatures(reader, learned, shifts)
    identity = {"target": runner.parts.description, "dtype": str(runner.kv_shape.dtype)}
    cache = FeatureCache(Path(config.cache), learned, shifts, identity, reader.top)
    if accelerator.is_main_process:
        cache.prepare(2 * runner.kv_shape.kv_heads * runner.kv_shape.head_dim * reader.dtype.itemsize)
    accelerator.wait_for_everyone()

    def told(done: int, total: int) -> None:
        progress("the target reads", done, total)

    complete = cache.fill(reader, told, (accelerator.process_index, accelerator.num_processes), stop)
    missing = accelerator.reduce(torch.tensor(float(not complete), device=accelerator.device), "sum")
    return None if missing > 0 else cache
