"""Small language models as drafts: reads them, checks them against a target, and runs them with a TargetRunner.

There are two kinds. A folder of ``longdraft train lm`` holds a decoder that uses the target's embedding and head. Any
other folder, a GGUF file or a hub id is a complete causal language model with the target's vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longdraft.drafts import draft_folder, draft_models, small_llama
from longdraft.drafts.draft import Draft, TrainedDraft
from longdraft.drafts.draft_folder import DraftFolder
from longdraft.drafts.fused_lm import FusedLM
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.folders import is_gguf
from longdraft.model.quant import stored
from longdraft.model.runner import TargetRunner
from longdraft.native import QuantizedMatrix

KIND = "small-lm"


@dataclass(frozen=True)
class BoundLM:
    """A small language model, in its target's dtype and on its device."""

    runner: TargetRunner  # runs the model. The inputs are target ids; the logits are over the draft's vocabulary.
    draft_to_target_ids: torch.Tensor | None  # (draft vocabulary,) target id of each draft id; None: ids are equal
    fused_lm: FusedLM | None = None  # computes a forward of few tokens in one kernel call; None: not supported


class SmallLMDraft(Draft[BoundLM]):
    """A small language model as a draft, of one of the two kinds."""

    kind = KIND
    loads_hub_files = False  # transformers downloads models by itself
    trained_length: int

    @classmethod
    def load(cls, folder: Path | str) -> SmallLMDraft:
        """Reads one of our draft folders, or the configuration of a model (a folder, a GGUF file or a hub id).
        Raises CheckpointError if the files cannot be read, the kind is another, or tensors do not fit."""
        name = os.fspath(folder)
        path = Path(name).expanduser()
        if path.is_dir() and "longdraft_format" in draft_folder.read_config(path):
            return TrainedLM(path, draft_folder.load(path, KIND))
        return PublishedLM(str(path) if path.is_dir() or is_gguf(path) else name)

    def with_trimmed_vocab(self, vocabulary: int | None = None) -> SmallLMDraft:
        """Returns the draft with a smaller head, which a forward reads in less time (FR-Spec, arXiv:2502.14856).

        The head keeps token ids below ``vocabulary``; None: all ids. Raises CapabilityError if the draft is a
        :class:`TrainedLM`, whose vocabulary was chosen in training.
        """
        if vocabulary is None:
            return self
        raise CapabilityError(f"The vocabulary of {self.folder} was chosen in training: leave vocabulary out.")


class TrainedLM(TrainedDraft[BoundLM], SmallLMDraft):
    """A draft of ``longdraft train lm``: decoder layers and a final norm, with the target's embedding and head.

    Attributes:
        sizes: the decoder's sizes, as transformers names them.
    """

    trained_length: int

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        super().__init__(folder, contents)
        if self.trained_length is None:
            raise CheckpointError(f"{draft_folder.CONFIG} of {folder} lacks trained_length: copy the draft again.")

    @property
    def sizes(self) -> dict[str, Any]:
        return dict(self.config["model"])

    def module(self) -> nn.Module:
        return small_llama.build_decoder(self.sizes)

    def needs(self) -> dict[str, Any]:
        return {"hidden_size": self.sizes.get("hidden_size")}

    def make(self, runner: TargetRunner) -> BoundLM:
        if runner.tp_rank is not None:
            raise CapabilityError(
                "A trained small language model uses the target's embedding and head, and each process of a sharded "
                "target has only a part of them: take longspec, eagle3 or prompt-lookup."
            )
        head, ids = self.head(runner)
        dense_head = stored.dequantize(head) if isinstance(head, QuantizedMatrix) else head
        weights = {n: t.to(runner.device, runner.kv_shape.dtype) for n, t in self.weights.items()}
        model = small_llama.build_causal_lm(self.sizes, weights, runner.shared_parts.embedding, dense_head)
        draft_runner = TargetRunner(model)
        draft_runner.execution_model.fused.quantize_for_draft()
        return BoundLM(draft_runner, ids, FusedLM.from_runner(draft_runner))


class PublishedLM(SmallLMDraft):
    """A causal language model in a folder, a GGUF file or on the hub. :meth:`make` reads the weights.

    The model must have the target's vocabulary. If both tokenizers are available, they are compared, and the heads may
    be padded to different sizes. If the target's origin is unknown, only the sizes of the heads are compared.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._name = name
        self._model_sizes = draft_models.read_model_sizes(name)
        self.trained_length = self._model_sizes.context_length
        if self.folder.is_dir():
            config = draft_folder.read_config(self.folder)
            self.retrieval_layer = draft_folder.optional_int(config, "retrieval_layer", name, minimum=0)
        self._vocabulary: int | None = None
        self._trimmed: dict[int, PublishedLM] = {}

    @property
    def parameters(self) -> int:
        return self._model_sizes.num_parameters

    @property
    def vocabulary(self) -> int | None:
        return self._vocabulary

    def with_trimmed_vocab(self, vocabulary: int | None = None) -> PublishedLM:
        if vocabulary is None or vocabulary >= self._model_sizes.vocab_size:
            return self
        if vocabulary not in self._trimmed:
            trimmed = self._trimmed[vocabulary] = PublishedLM(self._name)
            trimmed._vocabulary = vocabulary
        return self._trimmed[vocabulary]

    def check(self, runner: TargetRunner) -> None:
        mismatch = draft_models.vocabulary_mismatch(self._name, runner)
        draft_size, target_size = self._model_sizes.vocab_size, runner.vocab_size
        if mismatch is None and draft_size != target_size:
            mismatch = f"it has {draft_size} tokens, not {target_size}"
        if mismatch:
            raise CheckpointError(
                f"{self._name} does not have the target's vocabulary ({mismatch}), so it cannot draft for it. Name a "
                "model of the target's family, or train a draft: longdraft train lm."
            )

    def make(self, runner: TargetRunner) -> BoundLM:
        model = draft_models.read_draft_model(self._name, runner.kv_shape.dtype, runner.device)
        model = draft_models.fit_vocab_size(model, runner.vocab_size)
        if self._vocabulary is not None:
            model = draft_models.fit_head(model, self._vocabulary)
        draft_runner = TargetRunner(model)
        # With int8 arithmetic FusedLM shares the model's weights; with float32 it would need a second copy of them.
        fused_lm = FusedLM.from_runner(draft_runner) if draft_runner.arithmetic == "int8" else None
        return BoundLM(draft_runner, None, fused_lm)
