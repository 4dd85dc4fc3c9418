"""A small language model that drafts: read from its folder, checked against a target, and hosted like it.

Two kinds of folder: ours (``longdraft train lm``) holds a decoder that takes its embedding and its head from the
target; any other is a causal language model of transformers, with the target's vocabulary, and so is a GGUF file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longdraft.drafts import draft_folder
from longdraft.drafts.draft import Draft, TrainedDraft
from longdraft.drafts.draft_folder import DraftFolder
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.folders import is_gguf
from longdraft.model import draft_models, small_llama, stored
from longdraft.model.fused_lm import FusedLM
from longdraft.model.runner import TargetRunner
from longdraft.native import QuantizedMatrix

KIND = "small-lm"


@dataclass(frozen=True)
class BoundLM:
    """A small language model in its target's dtype and on its device.

    Attributes:
        runner: the model, hosted. It reads ids of the target; its logits are over the draft's vocabulary.
        draft_to_target_ids: (draft vocabulary,) target id of each draft id, on the device; None if they are the same.
        fused_lm: computes forwards of few rows in one kernel call; None without such kernels.
    """

    runner: TargetRunner
    draft_to_target_ids: torch.Tensor | None
    fused_lm: FusedLM | None = None


class SmallLMDraft(Draft[BoundLM]):
    """A language model that drafts."""

    kind = KIND
    loads_hub_files = False  # transformers fetches models by itself
    trained_length: int

    @classmethod
    def load(cls, folder: Path | str) -> SmallLMDraft:
        """Reads a draft folder of ours; of a model (a folder, a GGUF file or a hub id), its configuration.

        Raises:
            CheckpointError: unreadable, another kind of draft, or tensors missing, unexpected or of a wrong shape.
        """
        name = os.fspath(folder)
        path = Path(name).expanduser()
        if path.is_dir() and "longdraft_format" in draft_folder.read_config(path):
            return TrainedLM(path, draft_folder.load(path, KIND))
        return PublishedLM(str(path) if path.is_dir() or is_gguf(path) else name)

    def with_trimmed_vocab(self, vocabulary: int | None = None) -> SmallLMDraft:
        """The draft with fewer bytes to read.

        Args:
            vocabulary: the head has the target's first so many token ids alone (FR-Spec, arXiv:2502.14856).

        Raises:
            CapabilityError: the draft was trained, with a vocabulary and weights of its own.
        """
        if vocabulary is None:
            return self
        raise CapabilityError(f"{self.folder} was trained as it is: leave vocabulary out.")


class TrainedLM(TrainedDraft[BoundLM], SmallLMDraft):
    """A draft of ours: decoder layers and a final norm, between the target's embedding and rows of its head.

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
                "A small language model of ours has the model's embedding and head, of which each process of a sharded "
                "model has a part alone: take longspec, eagle3 or prompt-lookup."
            )
        head, ids = self.head(runner)
        floats = stored.dequantize(head) if isinstance(head, QuantizedMatrix) else head
        weights = {n: t.to(runner.device, runner.kv_shape.dtype) for n, t in self.weights.items()}
        model = small_llama.build_causal_lm(self.sizes, weights, runner.shared_parts.embedding, floats)
        hosted = TargetRunner(model)
        hosted.execution_model.fused.quantize_for_draft()
        return BoundLM(hosted, ids, FusedLM.of(hosted))


class PublishedLM(SmallLMDraft):
    """A causal language model, in a folder, a GGUF file or on the hub. Its weights are read when it is bound.

    Its vocabulary must be the target's. If both tokenizers are found, they are compared, and heads may be padded to
    different sizes. If the target's origin is unknown, only the sizes are compared.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._name = name
        self._described = draft_models.read_model_sizes(name)
        self.trained_length = self._described.context_length
        if self.folder.is_dir():
            config = draft_folder.read_config(self.folder)
            self.retrieval_layer = draft_folder.optional_int(config, "retrieval_layer", name, minimum=0)
        self._vocabulary: int | None = None
        self._lighter: dict[int, PublishedLM] = {}

    @property
    def parameters(self) -> int:
        return self._described.num_parameters

    @property
    def vocabulary(self) -> int | None:
        return self._vocabulary

    def with_trimmed_vocab(self, vocabulary: int | None = None) -> PublishedLM:
        if vocabulary is None or vocabulary >= self._described.vocab_size:
            return self
        if vocabulary not in self._lighter:
            made = self._lighter[vocabulary] = PublishedLM(self._name)
            made._vocabulary = vocabulary
        return self._lighter[vocabulary]

    def check(self, runner: TargetRunner) -> None:
        why = draft_models.vocabulary_mismatch(self._name, runner)
        mine, its = self._described.vocab_size, runner.vocab_size
        if why is None and mine != its:
            why = f"it has {mine} tokens, not {its}"
        if why:
            raise CheckpointError(
                f"{self._name} does not have the target's vocabulary ({why}), so it cannot draft for it. Name a model "
                "of the target's family, or train a draft: longdraft train lm."
            )

    def make(self, runner: TargetRunner) -> BoundLM:
        model = draft_models.read_draft_model(self._name, runner.kv_shape.dtype, runner.device)
        model = draft_models.fit_vocab_size(model, runner.vocab_size)
        if self._vocabulary is not None:
            model = draft_models.fit_head(model, self._vocabulary)
        hosted = TargetRunner(model)
        # In float32 it would take a second copy of the weights; in int8 arithmetic it is the model as it is.
        whole = FusedLM.of(hosted) if hosted.arithmetic == "int8" else None
        return BoundLM(hosted, None, whole)
