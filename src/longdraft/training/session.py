"""The skeleton of every training recipe.

It begins with processes, the target, the documents, and where their features come from (:func:`begin`); it ends with
the trainer, what is measured, and the draft's folder (:meth:`Session.train`). Between the two stands what a kind of
draft is: its module, new or read.

A recipe takes its settings, a ``progress`` that is told what is being prepared, how much is done, and of how much (0:
not known), and a ``stop`` that is asked after each step and while the target reads: True writes a checkpoint and ends.
It resumes where ``config.out`` holds a run. The draft with the best simulated acceptance is in ``out/best``, the last
one in ``out/last``. Started by torchrun or ``accelerate launch``, every process calls it. It raises LongdraftError: bad
data, no room on disk, a draft or a checkpoint of something else, a target that takes no drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from longdraft.drafts import draft_folder
from longdraft.errors import PromptError
from longdraft.model.loading import load
from longdraft.model.runner import TargetRunner
from longdraft.training import corpus
from longdraft.training.config import DEPTH, RunConfig
from longdraft.training.documents import Document, Skipped, documents
from longdraft.training.feature_cache import FeatureCache
from longdraft.training.features import FeatureReader, Features
from longdraft.training.kept_features import KeptSource, passages
from longdraft.training.measure import Ranks, by_step, simulate
from longdraft.training.run_log import Report
from longdraft.training.trainee import Trainee
from longdraft.training.trainer import FeatureSource, Trainer
from longdraft.training.vocabulary import most_frequent

# Held-out documents that a measurement takes: enough to compare, few enough to be quick.
MEASURED = 48
# The other processes wait while one downloads a model or reads a shard; a hung one is the launcher's to end.
PATIENCE = timedelta(days=7)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# what is being prepared, how much is done, and of how much (0: not known)
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """A progress that nobody is told of."""


def never() -> bool:
    """A stop that is never asked for."""
    return False


class LiveFeatures:
    """Features computed as they are asked for, and forgotten: the same whatever was asked for before."""

    def __init__(self, reader: FeatureReader, texts: list[Document], shifts: list[int]) -> None:
        self.reader, self.texts, self.offsets = reader, texts, shifts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> Features:
        self.reader.forget()
        return self.reader.read(self.texts[i], self.offsets[i])


@dataclass(frozen=True)
class Session:
    """A run that is about to train.

    Attributes:
        data: the documents, split.
        half: whether matrix products are bfloat16.
    """

    config: RunConfig
    accelerator: Accelerator
    runner: TargetRunner
    tokenizer: PreTrainedTokenizerBase
    data: corpus.Corpus
    progress: Progress
    stop: Callable[[], bool]

    @property
    def half(self) -> bool:
        return self.config.precision == "bf16"

    @property
    def product_dtype(self) -> torch.dtype:
        """Of the head's matrix products."""
        return torch.bfloat16 if self.half else torch.float32

    def vocabulary(self) -> torch.Tensor | None:
        """Target ids of a new draft's vocabulary; None for all."""
        config, runner = self.config, self.runner
        if config.vocabulary is None or config.vocabulary >= runner.vocab_size:
            return None
        counted: Iterable[Document] = self.data.learned
        if config.vocabulary_from:
            files = [Path(p) for p in config.vocabulary_from]
            counted = documents(files, self.tokenizer, Skipped(), runner.vocab_size)
        return most_frequent(counted, runner.vocab_size, config.vocabulary, runner.eos_token_ids)

    def reader(self, layers: tuple[int, ...] | None = ()) -> FeatureReader:
        """Reads what the draft reads: hidden states of ``layers``, the last layer's KV, or nothing (None)."""
        dtype = torch.bfloat16 if self.half else self.runner.kv_shape.dtype
        return FeatureReader(self.runner, self.config.top, dtype, layers)

    def source(self, reader: FeatureReader) -> FeatureSource | None:
        """Where features come from; None where ``stop`` ended the filling of the cache."""
        config, runner, learned, accelerator = self.config, self.runner, self.data.learned, self.accelerator
        if not config.anchor_offset and self._kept(learned):
            return KeptSource(learned, runner.parts.description, reader)
        if any(d.kept for d in learned):
            self.progress(
                "features that were kept beside answers are left alone: they serve where all data have them, positions "
                "are plain (anchor_offset) and the target is not stretched",
                0,
                0,
            )
        shifts = corpus.offsets(learned, config.anchor_offset, runner.context_length, config.seed)
        if config.cache is None:
            return LiveFeatures(reader, learned, shifts)
        identity: dict[str, Any] = {"target": runner.parts.description, "dtype": str(runner.kv_shape.dtype)}
        if config.target_rope_factor is not None:
            identity["rope_factor"] = config.target_rope_factor  # no part of the description: drafts fit either way
        if reader.layers:
            identity["layers"] = list(reader.layers)
        if not reader.names:
            identity["reads"] = "text"
        cache = FeatureCache(Path(config.cache), learned, shifts, identity, reader.top, reader.names)
        if accelerator.is_main_process:
            cache.prepare(reader.bytes_per_token)
        accelerator.wait_for_everyone()

        def told(done: int, total: int) -> None:
            self.progress("the target reads", done, total)

        complete = cache.fill(reader, told, (accelerator.process_index, accelerator.num_processes), self.stop)
        missing = accelerator.reduce(torch.tensor(float(not complete), device=accelerator.device), "sum")
        return None if missing > 0 else cache

    def _kept(self, documents: list[Document]) -> bool:
        """Whether features of all of them were kept, by the target as it is."""
        return self.config.target_rope_factor is None and all(d.kept for d in documents)

    def held_out(self, reader: FeatureReader) -> list[Features]:
        """Documents to measure on. They keep their own positions: that is how they will be decoded."""
        held_out = self.data.held_out
        chosen = held_out[:: max(1, len(held_out) // MEASURED)][:MEASURED]
        if self._kept(chosen):
            kept = KeptSource(chosen, self.runner.parts.description, reader)
            return [kept[i] for i in range(len(kept))]
        return [reader.read(d).on_host() for d in chosen]

    def train(
        self,
        trainee: Trainee,
        reader: FeatureReader,
        source: FeatureSource,
        kind: str,
        config: Mapping[str, Any],
        *,
        levels: int,
        measured: int = DEPTH,
        ranks_of: Ranks = by_step,
        shifts: int = 1,
    ) -> Iterator[Report]:
        """Trains a module, a report a step.

        Args:
            trainee: one part of it is what is trained.
            kind, config: of the draft, as its folder will have them.
            levels: depths that the trainee tells rows of. measured: depths that simulated acceptance drafts.
            ranks_of: how the trainee is asked for that. shifts: the largest shift that a document is given.
        """
        held_out = self.held_out(reader)

        def save_draft(weights: Mapping[str, torch.Tensor], name: str) -> None:
            own = {path.partition(".")[2]: t for path, t in weights.items()}  # without the trainee's name for it
            draft = draft_folder.trained(kind, config, own, trainee.kept, self.runner.parts.description)
            draft_folder.save(Path(self.config.out) / name, draft)

        yield from Trainer(
            self.config,
            self.accelerator,
            trainee.to(self.runner.device),
            self.data.learned,
            source,
            (lambda module: simulate(module, held_out, measured, ranks_of=ranks_of)) if held_out else None,
            save_draft,
            shifts,
            levels,
        ).run(self.stop, lambda line: self.progress(line, 0, 0))


def begin(
    config: RunConfig, shortest_learned: int, progress: Progress, stop: Callable[[], bool], keep_end: bool = False
) -> Session:
    """Sets torch and accelerate up, loads the target, and reads the documents.

    Args:
        shortest_learned: a document must have more learned tokens than this.
        keep_end: of a prompt and its answer that are too long together, keep the last tokens, not the first.
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
    with accelerator.main_process_first():  # the first to come downloads, and compiles kernels
        model, tokenizer = load(
            config.target,
            dtype=config.target_dtype,
            device=device,
            rope_factor=config.target_rope_factor,
            progress=lambda line: progress(line, 0, 0),
        )
    runner = TargetRunner(model)
    skipped = Skipped()
    found = list(documents([Path(p) for p in config.data], tokenizer, skipped, runner.vocab_size))
    about = passages(found) if config.passages else []
    if config.passages and not about:
        raise PromptError("passages: the data have no answers whose features were kept; leave it out.")
    data = corpus.collect(
        [*found, *about],
        skipped,
        max_length=min(config.max_length, runner.context_length),
        min_length=config.min_length,
        shortest_learned=shortest_learned,
        held_out=config.held_out,
        sample=config.sample,
        keep_end=keep_end,
    )
    progress(f"{len(data.learned):,} documents, {len(data.held_out):,} held out; left out: {skipped}", 0, 0)
    return Session(config, accelerator, runner, tokenizer, data, progress, stop)
