"""The frame of every training run.

:func:`begin` starts processes, loads the target and reads the documents. :class:`Session` finds the vocabulary and the
target's features, and trains. What lies between is the kind of draft: its module, new or read from a folder.

Every ``train_...`` function takes settings, a ``progress`` (called with what is being prepared, how much is done, and
of how much, 0 if unknown), and a ``stop`` (called after each step and while the target reads; True writes a checkpoint
and ends). It yields a report for each step, and resumes the run in ``config.out`` if there is one. The draft with the
best simulated acceptance is saved in ``out/best``, the last one in ``out/last``. Under torchrun or ``accelerate
launch``, every process calls it. It raises LongdraftError for bad data, a full disk, a draft or checkpoint that does
not fit, or a target that takes no drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from longdraft.drafts import draft_folder
from longdraft.errors import CapabilityError, PromptError
from longdraft.model.layer_shards import shard_layers
from longdraft.model.loading import load
from longdraft.model.runner import TargetRunner
from longdraft.training import corpus, tokens
from longdraft.training.ahead import Ahead, FeatureSource
from longdraft.training.config import DEPTH, RunConfig
from longdraft.training.documents import Document, Skipped
from longdraft.training.feature_cache import FeatureCache
from longdraft.training.features import FeatureReader, Features, LiveFeatures
from longdraft.training.held_out import ROOM, HeldOut
from longdraft.training.in_step import InStepRunner
from longdraft.training.kept_features import KeptSource, passages
from longdraft.training.measure import Ranks, Simulated, by_step, simulate
from longdraft.training.run_log import Report
from longdraft.training.trainee import StepOutput, Trainee
from longdraft.training.trainer import Trainer
from longdraft.training.vocabulary import most_frequent

# Held-out documents of a measurement: enough to compare, few enough to be quick.
MEASURED = 48
# The other processes wait while one downloads a model or reads a shard. Ending a hung one is left to the launcher.
PATIENCE = timedelta(days=7)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# what is being prepared, how much is done, of how much (0: unknown)
Progress = Callable[[str, int, int], None]


# Fits a new draft to the documents' features.
Fit = Callable[[Iterator[Features]], None]


def silent(what: str, done: int, total: int) -> None:
    """A ``progress`` that shows nothing."""


def never() -> bool:
    """A ``stop`` that never stops."""
    return False


@dataclass(frozen=True)
class Session:
    """A run whose target is loaded and whose documents are read.

    Attributes:
        data: the documents, split into learned and held out.
    """

    config: RunConfig
    accelerator: Accelerator
    runner: TargetRunner
    tokenizer: PreTrainedTokenizerBase
    data: corpus.Corpus
    progress: Progress
    stop: Callable[[], bool]

    @property
    def product_dtype(self) -> torch.dtype:
        """Dtype of matrix products."""
        return torch.bfloat16 if self.config.precision == "bf16" else torch.float32

    def sizes(self) -> dict[str, Any]:
        """The sizes that a new draft takes from the target."""
        parts, kv = self.runner.parts, self.runner.kv_shape
        return {
            "hidden_size": parts.hidden_size,
            "intermediate_size": self.config.intermediate_size or parts.intermediate_size,
            "heads": parts.heads,
            "kv_heads": kv.kv_heads,
            "head_dim": kv.head_dim,
            "rms_norm_eps": parts.rms_norm_eps,
        }

    def vocabulary(self) -> torch.Tensor | None:
        """Target ids of a new draft's vocabulary; None for all."""
        config, runner = self.config, self.runner
        if config.vocabulary is None or config.vocabulary >= runner.vocab_size:
            return None
        counted: Iterable[Document] = self.data.learned
        if config.vocabulary_from:
            counted = chain.from_iterable(
                tokens.sources(config.vocabulary_from, self.tokenizer, Skipped(), runner.vocab_size)
            )
        return most_frequent(counted, runner.vocab_size, config.vocabulary, runner.eos_token_ids)

    def source(
        self, layers: tuple[int, ...] | None, fit: Fit | None = None, keys: bool = False
    ) -> FeatureSource | None:
        """The features of the learned documents; None if ``stop`` ended the filling of the cache.

        Args:
            layers: decoder layers whose hidden states the draft reads; (): the last layer's KV; None: the text alone.
            fit: called with the documents' features, one after the other, before a cache is filled.
            keys: beside hidden states, it reads the last layer's KV.
        """
        config, runner, learned = self.config, self.runner, self.data.learned
        dtype = torch.bfloat16 if config.precision == "bf16" else runner.kv_shape.dtype
        reader = FeatureReader(runner, dtype, layers, keys, config.distill > 0)
        if not config.anchor_offset and self._kept(learned):
            kept = KeptSource(learned, runner.parts.description, reader)
            if fit is not None:
                fit(map(kept.__getitem__, range(len(learned))))
            return kept
        if learned.with_features:
            line = (
                "features kept beside answers are not used: all data must have them, with plain positions "
                "(anchor_offset: 0) and a target that is not stretched"
            )
            self.progress(line, 0, 0)
        offsets = corpus.offsets(learned.lengths, config.anchor_offset, runner.context_length, config.seed)
        live = LiveFeatures(reader, learned, offsets)
        if fit is not None:
            fit(map(live.__getitem__, range(len(learned))))
        if config.cache is None:
            return live
        return self._cached(Path(config.cache), reader, offsets)

    def _cached(self, folder: Path, reader: FeatureReader, offsets: Sequence[int]) -> FeatureSource | None:
        runner, accelerator = self.runner, self.accelerator
        identity: dict[str, Any] = {"target": runner.parts.description, "dtype": str(runner.kv_shape.dtype)}
        if self.config.target_rope_factor is not None:
            identity["rope_factor"] = self.config.target_rope_factor  # not in the description: drafts fit either way
        if reader.layers:
            identity["layers"] = list(reader.layers)
        cache = FeatureCache(folder, self.data.learned, offsets, identity, reader)
        if accelerator.is_main_process:
            cache.prepare()
        accelerator.wait_for_everyone()
        complete = cache.fill(
            lambda done, total: self.progress("the target reads", done, total),
            (accelerator.process_index, accelerator.num_processes),
            self.stop,
        )
        unfinished = accelerator.reduce(torch.tensor(float(not complete), device=accelerator.device), "sum")
        return None if unfinished > 0 else cache

    def _kept(self, documents: corpus.Documents) -> bool:
        """True if features of all documents were kept, and the target is the one that computed them."""
        return self.config.target_rope_factor is None and documents.with_features == len(documents)

    def held_out(self, reader: FeatureReader, ahead: Ahead, levels: int) -> HeldOut:
        """This process's share of the documents to measure on. Positions are plain, as in decoding.

        Args:
            levels: documents have more learned tokens than this.
        """
        held_out = self.data.held_out
        spans = zip(held_out.lengths, held_out.starts, strict=True)
        long = [i for i, (length, start) in enumerate(spans) if length - start > levels]
        chosen = [held_out[i] for i in long[:: max(1, len(long) // MEASURED)][:MEASURED]]
        source: FeatureSource = LiveFeatures(reader, chosen, [0] * len(chosen))
        if chosen and self.config.target_rope_factor is None and all(document.kept for document in chosen):
            source = KeptSource(chosen, self.runner.parts.description, reader)
        share = self.accelerator.process_index, self.accelerator.num_processes
        return HeldOut(source, len(chosen), ahead, share, 0 if self.config.shard_target else ROOM)

    def _summed(self, counts: torch.Tensor) -> torch.Tensor:
        """Whole numbers added up over the processes."""
        total: torch.Tensor = self.accelerator.reduce(counts.to(self.accelerator.device), "sum")
        return total.cpu()

    def train(
        self,
        trainee: Trainee,
        layers: tuple[int, ...] | None,
        kind: str,
        config: Mapping[str, Any],
        *,
        levels: int,
        fit: Fit | None = None,
        keys: bool = False,
        measured: int = DEPTH,
        ranks_of: Ranks = by_step,
        shifts: int = 1,
    ) -> Iterator[Report]:
        """Trains a module; yields a report for each step.

        Args:
            layers: decoder layers whose hidden states the draft reads; (): the last layer's KV; None: the text alone.
            kind, config: the draft's kind, and what its config.json adds to the common entries.
            levels: the largest depth that the trainee reports. measured: levels that simulated acceptance drafts.
            fit, keys: of :meth:`source`; a new draft is fitted to what the target computes.
            ranks_of: computes ranks for simulated acceptance. shifts: the largest shift that a document is given.
        """
        run, device = self.config, self.runner.device
        if (source := self.source(layers, fit, keys)) is None:
            return
        trainee.recompute = run.recompute
        if run.distill:
            trainee.measure_scale(self.runner)
        # Where one CPU computes both, reading ahead would only make them take turns.
        usual = int((source.from_disk or device.type != "cpu") and not run.shard_target)

        def save_draft(weights: Mapping[str, torch.Tensor], name: str) -> None:
            own = {name.removeprefix("block."): t for name, t in weights.items()}
            draft = draft_folder.trained(kind, config, own, trainee.kept, self.runner.parts.description)
            draft_folder.save(Path(run.out) / name, draft)

        with Ahead(device, usual if run.read_ahead is None else run.read_ahead) as ahead:
            held_out = self.held_out(source.reader, ahead, measured)

            def measure(module: Callable[..., StepOutput]) -> Simulated:
                return simulate(module, held_out, measured, ranks_of, self._summed)

            yield from Trainer(
                run,
                self.accelerator,
                trainee.to(device),
                self.data.learned,
                source,
                measure if len(held_out) else None,
                save_draft,
                shifts,
                levels,
                ahead,
            ).run(self.stop, lambda line: self.progress(line, 0, 0))


def begin(
    config: RunConfig, shortest_learned: int, progress: Progress, stop: Callable[[], bool], keep_end: bool = False
) -> Session:
    """Sets up torch and accelerate, loads the target, and reads the documents.

    Args:
        shortest_learned: a document must have more learned tokens than this.
        keep_end: of a prompt and answer that are too long together, keep the end instead of the beginning.
    """
    if config.opener is not None:
        opened: Session = config.opener(config)
        return opened
    if config.threads:
        torch.set_num_threads(config.threads)
    device_name = config.device or ""
    if device_name.startswith("cuda:") and torch.cuda.is_available():
        torch.cuda.set_device(device_name)  # accelerate takes the current one
    accelerator = Accelerator(
        cpu=device_name == "cpu",
        mixed_precision=config.precision,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    runner, tokenizer = _target(config, accelerator, progress)
    skipped = Skipped()
    sources = tokens.sources(config.data, tokenizer, skipped, runner.vocab_size)
    if config.passages:
        about = passages(document for source in sources if source.kept for document in source)
        if not about:
            raise PromptError("passages: the data have no answers whose features were kept; leave it out.")
        sources.append(tokens.Tokens.of(about))
    data = corpus.collect(
        sources,
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


def _target(
    config: RunConfig, accelerator: Accelerator, progress: Progress
) -> tuple[TargetRunner, PreTrainedTokenizerBase]:
    """Loads the target, whole or spread over the processes, and its tokenizer.

    Raises:
        CapabilityError: it is to be spread, and there is one process, or a target that cannot be spread.
    """
    several, device, dtype = accelerator.num_processes > 1, accelerator.device, config.target_dtype
    spread = config.shard_target
    if spread and not several:
        raise CapabilityError(
            "shard_target spreads the target over several processes, and there is one: start the run with torchrun, or "
            "leave shard_target out."
        )
    if spread and dtype == "auto" and device.type != "cpu":
        dtype = "bfloat16"
    place = "cpu" if spread else device if several or not config.device else config.device
    with accelerator.main_process_first():  # the first process downloads, and compiles kernels
        model, tokenizer = load(
            config.target,
            dtype=dtype,
            device=place,
            rope_factor=config.target_rope_factor,
            weights="float32" if spread else None,
            progress=lambda line: progress(line, 0, 0),
        )
    if not spread:
        return TargetRunner(model), tokenizer
    progress(f"Spreading the target's layers over {accelerator.num_processes} processes", 0, 0)
    shard_layers(model, device, accelerator.num_processes)
    return InStepRunner(model), tokenizer
