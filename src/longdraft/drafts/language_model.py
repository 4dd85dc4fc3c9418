"""Small language models as drafts: reads them, checks them against a target, and runs them with a TargetRunner.

There are two kinds. A folder of ``longdraft train lm`` holds a decoder that uses the target's embedding and head. Any
other folder, a GGUF file or a hub id is a complete causal language model, with the target's vocabulary or another one.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.drafts import draft_folder, draft_models, small_llama
from longdraft.drafts.draft import Draft, TrainedDraft
from longdraft.drafts.draft_folder import DraftFolder
from longdraft.drafts.fused_lm import FusedLM
from longdraft.drafts.token_map import TokenMap
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.folders import is_gguf
from longdraft.model.model_parts import decoder_config
from longdraft.model.quant import stored
from longdraft.model.runner import TargetRunner

KIND = "small-lm"


@dataclass(frozen=True)
class BoundLM:
    """A small language model, in its target's dtype and on its device."""

    runner: TargetRunner  # runs the model, whose inputs come from :meth:`translate`
    draft_to_target_ids: torch.Tensor | None  # (rows of the head,) target id of each row; None: ids are equal
    fused_lm: FusedLM | None = None  # computes a forward of few tokens in one kernel call; None: not supported
    input_ids: torch.Tensor | None = None  # (target vocabulary,) draft id of each input; None: ids are equal
    bos_token_id: int | None = None  # stands for the first token of a text that another tokenizer made

    def translate(self, batch: ForwardBatch) -> ForwardBatch:
        """Returns a batch of target ids with the ids that the draft is fed."""
        if self.input_ids is None:
            return batch
        assert batch.token_ids is not None and batch.positions is not None
        last_id = len(self.input_ids) - 1  # the target's embedding may have more rows than its head
        token_ids = self.input_ids[batch.token_ids.clamp(max=last_id)]
        if self.bos_token_id is not None:  # drafts that were trained with BOS need one
            token_ids = token_ids.masked_fill(batch.positions == 0, self.bos_token_id)
        return replace(batch, token_ids=token_ids)


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
        dense_head = head if isinstance(head, torch.Tensor) else stored.dequantize(head)
        weights = {n: t.to(runner.device, runner.kv_shape.dtype) for n, t in self.weights.items()}
        model = small_llama.build_causal_lm(self.sizes, weights, runner.shared_parts.embedding, dense_head)
        draft_runner = TargetRunner(model)
        draft_runner.execution_model.fused.quantize_for_draft()
        return BoundLM(draft_runner, ids, FusedLM.from_runner(draft_runner))


class PublishedLM(SmallLMDraft):
    """A causal language model in a folder, a GGUF file or on the hub. :meth:`make` reads the weights.

    If both tokenizers are available, they are compared. If they differ, tokens are matched by their text
    (:mod:`longdraft.drafts.token_map`). If the vocabularies are equal, heads may be padded to different sizes.
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
        self._token_maps: weakref.WeakKeyDictionary[TargetRunner, TokenMap | None] = weakref.WeakKeyDictionary()
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

    def token_map(self, runner: TargetRunner) -> TokenMap | None:
        """Returns how to draft with another vocabulary than the target's; None if token ids mean the same for both.
        Raises CheckpointError if tokens cannot be matched."""
        if runner not in self._token_maps:
            sizes = self._model_sizes.vocab_size, self._vocabulary
            self._token_maps[runner] = draft_models.token_map(self._name, runner, *sizes)
        return self._token_maps[runner]

    def check(self, runner: TargetRunner) -> None:
        self.token_map(runner)

    def remarks(self, runner: TargetRunner) -> list[str]:
        if (token_map := self.token_map(runner)) is None:
            return []
        return [
            f"its tokenizer is not the target's: it proposes the {len(token_map.draft_ids):,} tokens that both have, "
            f"of the target's {runner.vocab_size:,}. Where a text has others, its proposals end: a model of the "
            "target's family pays more"
        ]

    def make(self, runner: TargetRunner) -> BoundLM:
        token_map, device = self.token_map(runner), runner.device
        model = draft_models.read_draft_model(self._name, runner.kv_shape.dtype, device)
        target_ids, input_ids, bos = None, None, None
        if token_map is not None:
            target_ids, input_ids = token_map.target_ids.to(device), token_map.input_ids.to(device)
            bos = getattr(decoder_config(model), "bos_token_id", None)
            model = draft_models.fit_head(model, token_map.draft_ids)
        else:
            model = draft_models.fit_vocab_size(model, runner.vocab_size)
            if self._vocabulary is not None:
                model = draft_models.fit_head(model, self._vocabulary)
        draft_runner = TargetRunner(model)
        # With int8 arithmetic FusedLM shares the model's weights; with float32 it would need a second copy of them.
        fused_lm = FusedLM.from_runner(draft_runner) if draft_runner.arithmetic == "int8" else None
        return BoundLM(draft_runner, target_ids, fused_lm, input_ids, bos)
