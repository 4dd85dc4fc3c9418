"""Starts a training run: processes, target and documents.

Every kind of draft has a function ``train_...``, which makes the draft's module and has it trained by
:class:`longdraft.training.loop.TrainingLoop`. The function takes the run's config, ``progress`` (called with messages
before the first step) and ``stop`` (called after each step; if it returns True, the run writes a checkpoint and ends).
It yields a report for each step, and resumes the run in ``config.out`` if there is one. ``out/best`` is the draft with
the best simulated acceptance, ``out/last`` the last draft. Under torchrun or ``accelerate launch``, every process calls
the function. It raises LongdraftError for bad data, a full disk, a draft or checkpoint that does not fit, or a target
that the kind does not support.
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
from longdraft.model.load.loading import load
from longdraft.model.runner import TargetRunner
from longdraft.training import dataset
from longdraft.training.config import RunConfig
from longdraft.training.documents import SkipCounts
from longdraft.training.features import FeatureReader

# Long, because all processes wait while one downloads a model. The launcher may end a process that hangs.
PROCESS_TIMEOUT = timedelta(days=7)

Progress = Callable[[str], None]
Stop = Callable[[], bool]


def no_progress(message: str) -> None:
    """Ignores a message."""


def never_stop() -> bool:
    """Returns False: the run does not end early."""
    return False


class TrainingSession:
    """The accelerator, the target, and the documents of a run.
    Raises CapabilityError if a tracker is not installed, or unknown to accelerate.

    Args:
        levels: number of drafted tokens. A document must have more tokens in the loss than ``levels``.
        progress: called with messages before the first step.
        stop: called after each step; if it returns True, the run ends.

    Attributes:
        tokenizer: the target's tokenizer.
        runner: runs the target.
        train_documents: the documents to train on.
        held_out: the documents to measure on.
    """

    def __init__(self, config: RunConfig, levels: int, progress: Progress = no_progress, stop: Stop = never_stop):
        if config.threads:
            torch.set_num_threads(config.threads)
        device_name = config.device or ""
        if device_name.startswith("cuda:") and torch.cuda.is_available():
            torch.cuda.set_device(device_name)  # accelerate takes the current CUDA device
        if missing := set(config.track) - {str(tracker) for tracker in get_available_trackers()}:
            raise CapabilityError(f"track: {', '.join(sorted(missing))} is not installed: install it, or leave it out.")
        self.config, self.progress, self.stop = config, progress, stop
        self.accelerator = accelerator = Accelerator(
            cpu=device_name == "cpu",
            mixed_precision=config.precision,
            log_with=list(config.track) or None,
            project_dir=config.out,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PROCESS_TIMEOUT)],
        )
        device = accelerator.device if accelerator.num_processes > 1 or not config.device else config.device
        rope_factor = config.target_rope_factor
        with accelerator.main_process_first():  # one process downloads the model and compiles kernels
            loaded = load(
                config.target, dtype=config.target_dtype, device=device, rope_factor=rope_factor, progress=progress
            )
        model, self.tokenizer = loaded
        self.runner = runner = TargetRunner(model)
        skipped = SkipCounts()
        documents = dataset.read_dataset(
            config.data, self.tokenizer, skipped, runner.vocab_size, config.template_kwargs
        )
        split = dataset.split_dataset(documents, skipped, config, levels, runner.context_length)
        self.train_documents, self.held_out = split
        progress(f"{len(self.train_documents):,} documents, {len(self.held_out):,} held out; left out: {skipped}")

    def draft_sizes(self) -> dict[str, Any]:
        """Returns the sizes of a new draft's block. They equal the target's, but for the MLP if the settings say so."""
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
        """Returns the target ids of a new draft's vocabulary; None: all target ids."""
        config, runner = self.config, self.runner
        if config.vocabulary is None or config.vocabulary >= runner.vocab_size:
            return None
        documents = self.train_documents
        if config.vocabulary_from:
            documents = dataset.read_dataset(config.vocabulary_from, self.tokenizer, SkipCounts(), runner.vocab_size)
        return dataset.most_frequent_tokens(documents, runner.vocab_size, config.vocabulary, runner.eos_token_ids)

    def anchor_offset(self, i: int, epoch: int) -> int:
        """Returns the random anchor-offset of training document i in an epoch (LongSpec, section 3.2)."""
        config = self.config
        limit = max(0, min(config.anchor_offset, self.runner.context_length - self.train_documents.lengths[i]))
        return random.Random(f"{config.seed}/{epoch}/{i}").randint(0, limit) if limit else 0

    def feature_reader(self, layers: tuple[int, ...] | None, with_argmax: bool = True) -> FeatureReader:
        """Makes a :class:`FeatureReader` with this run's target, dtype and cache."""
        config, runner = self.config, self.runner
        dtype = torch.bfloat16 if config.precision == "bf16" else runner.kv_shape.dtype
        # The description lacks the target's YaRN factor, because a draft fits the target with or without YaRN.
        identity = runner.shared_parts.description, str(runner.kv_shape.dtype), str(dtype), config.target_rope_factor
        cache = None if config.cache is None else Path(config.cache)
        return FeatureReader(runner, dtype, layers, config.distill > 0, cache, identity, with_argmax)
