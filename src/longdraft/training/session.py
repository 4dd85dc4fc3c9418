"""The beginning of every training run: processes, the target, and the documents.

A kind of draft makes a module for a :class:`TrainingSession`, new or read from a folder, and
:class:`longdraft.training.loop.Loop` trains it.

Every ``train_...`` function takes settings, a ``progress`` (called with what is being prepared), and a ``stop`` (called
after each step; True writes a checkpoint and ends). It yields a report for each step, and resumes the run in
``config.out`` if there is one. The draft with the best simulated acceptance is saved in ``out/best``, the last one in
``out/last``. Under torchrun or ``accelerate launch``, every process calls it. It raises LongdraftError for bad data, a
full disk, a draft or checkpoint that does not fit, or a target that takes no drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs

from longdraft.errors import CapabilityError
from longdraft.model.loading import load
from longdraft.model.runner import TargetRunner
from longdraft.training import dataset
from longdraft.training.config import RunConfig
from longdraft.training.documents import SkipCounts
from longdraft.training.features import FeatureReader

# The other processes wait while one downloads a model or reads a shard. Ending a hung one is left to the launcher.
PROCESS_TIMEOUT = timedelta(days=7)

# Called with what is being prepared; asked after each step whether to end there.
Progress = Callable[[str], None]
Stop = Callable[[], bool]


def no_progress(what: str) -> None:
    """A ``progress`` that shows nothing."""


def never_stop() -> bool:
    """A ``stop`` that never stops."""
    return False


class TrainingSession:
    """A run whose processes are there, whose target is loaded, and whose documents are read.

    Args:
        levels: a document must have more learned tokens than this.

    Attributes:
        learned, held_out: the documents to train on and to measure on.

    Raises:
        CapabilityError: a tracker is asked for that is not installed, or that accelerate does not know.
    """

    def __init__(
        self, config: RunConfig, levels: int, progress: Progress = no_progress, stop: Stop = never_stop
    ) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        device_name = config.device or ""
        if device_name.startswith("cuda:") and torch.cuda.is_available():
            torch.cuda.set_device(device_name)  # accelerate takes the current one
        if lacking := set(config.track) - {str(each) for each in get_available_trackers()}:
            raise CapabilityError(f"track: {', '.join(sorted(lacking))} is not there: install it, or leave it out.")
        self.config, self.progress, self.stop = config, progress, stop
        self.accelerator = accelerator = Accelerator(
            cpu=device_name == "cpu",
            mixed_precision=config.precision,
            log_with=list(config.track) or None,
            project_dir=config.out,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PROCESS_TIMEOUT)],
        )
        place = accelerator.device if accelerator.num_processes > 1 or not config.device else config.device
        factor, skipped = config.target_rope_factor, SkipCounts()
        with accelerator.main_process_first():  # the first process downloads, and compiles kernels
            loaded = load(config.target, dtype=config.target_dtype, device=place, rope_factor=factor, progress=progress)
        model, self.tokenizer = loaded
        self.runner = runner = TargetRunner(model)
        whole = dataset.read_dataset(config.data, self.tokenizer, skipped, runner.vocab_size, config.template_kwargs)
        self.train_documents, self.held_out = dataset.split_dataset(
            whole, skipped, config, levels, runner.context_length
        )
        progress(f"{len(self.train_documents):,} documents, {len(self.held_out):,} held out; left out: {skipped}")

    def draft_sizes(self) -> dict[str, Any]:
        """The sizes that a new draft takes from the target."""
        parts, kv = self.runner.shared_parts, self.runner.kv_shape
        return {
            "hidden_size": parts.hidden_size,
            "intermediate_size": self.config.intermediate_size or parts.intermediate_size,
            "heads": parts.num_heads,
            "kv_heads": kv.kv_heads,
            "head_dim": kv.head_dim,
            "rms_norm_eps": parts.rms_norm_eps,
        }

    def vocabulary(self) -> torch.Tensor | None:
        """Target ids of a new draft's vocabulary; None for all."""
        config, runner = self.config, self.runner
        if config.vocabulary is None or config.vocabulary >= runner.vocab_size:
            return None
        counted = self.train_documents
        if config.vocabulary_from:
            counted = dataset.read_dataset(config.vocabulary_from, self.tokenizer, SkipCounts(), runner.vocab_size)
        return dataset.most_frequent_tokens(counted, runner.vocab_size, config.vocabulary, runner.eos_token_ids)

    def anchor_offset(self, i: int, epoch: int) -> int:
        """A learned document's anchor-offset in an epoch: uniform in 0 .. ``anchor_offset``, or less to stay in the
        context (LongSpec, section 3.2)."""
        config = self.config
        most = max(0, min(config.anchor_offset, self.runner.context_length - self.train_documents.lengths[i]))
        return random.Random(f"{config.seed}/{epoch}/{i}").randint(0, most) if most else 0

    def feature_reader(self, layers: tuple[int, ...] | None, with_argmax: bool = True) -> FeatureReader:
        """The reader of the target's features, ``layers`` and ``with_argmax`` as :class:`FeatureReader` has them."""
        config, runner = self.config, self.runner
        dtype = torch.bfloat16 if config.precision == "bf16" else runner.kv_shape.dtype
        # The factor is not in the description: drafts fit either way.
        identity = runner.shared_parts.description, str(runner.kv_shape.dtype), str(dtype), config.target_rope_factor
        cache = None if config.cache is None else Path(config.cache)
        return FeatureReader(runner, dtype, layers, config.distill > 0, cache, identity, with_argmax)
