"""A small language model that drafts: read from its folder, checked against a target, and hosted like it.

Two kinds of folder: ours (``longdraft train lm``) holds a decoder that takes its embedding and its head from the
target; any other is a causal language model of transformers, with the target's vocabulary.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch

from longdraft.drafters import draft_folder
from longdraft.drafters.draft_folder import DraftFolder
from longdraft.errors import CheckpointError
from longdraft.target import companions, small_models
from longdraft.target.loading import load_weights
from longdraft.target.runner import TargetRunner

KIND = "small-lm"
OFFSETS = "d2t"


@dataclass(frozen=True)
class BoundLM:
    """A small language model in its target's dtype and on its device.

    Attributes:
        runner: the model, hosted. It reads ids of the target; its logits are over the draft's vocabulary.
        ids: (draft vocabulary,) target id of each draft id, on the device; None where they are the same.
        trained_length: tokens of the longest text it was trained on.
    """

    runner: TargetRunner
    ids: torch.Tensor | None
    trained_length: int


class SmallLMDraft(ABC):
    """A language model that drafts. Runs on the same target share what :meth:`bound` makes of it.

    Attributes:
        folder: of the model; a hub id stands as it was given.
        trained_length: tokens of the longest text it was trained on.
    """

    kind = KIND
    folder: Path
    trained_length: int

    def __init__(self) -> None:
        self._bound: weakref.WeakKeyDictionary[TargetRunner, BoundLM] = weakref.WeakKeyDictionary()

    @classmethod
    def load(cls, folder: Path | str) -> SmallLMDraft:
        """Reads a draft folder of ours; of a model of transformers (a folder or a hub id), its configuration.

        Raises:
            CheckpointError: unreadable, another kind of draft, or tensors missing, unexpected or of a wrong shape.
        """
        name = os.fspath(folder)
        path = Path(name).expanduser()
        if path.is_dir() and "longdraft_format" in draft_folder.read_config(path):
            return TrainedLM(path, draft_folder.load(path))
        return PublishedLM(str(path) if path.is_dir() else name)

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Numbers in its own tensors."""

    @property
    def retrieval_layer(self) -> int | None:
        """The target's layer by whose attention chunks are best retrieved; None where the folder names none."""
        return draft_folder.retrieval_layer(Path(self.folder))

    @property
    def vocabulary(self) -> int | None:
        """Tokens it can propose; None: all of the target's."""
        return None

    @abstractmethod
    def check(self, runner: TargetRunner) -> None:
        """Refuses a target that the draft does not fit.

        Raises:
            CheckpointError: saying what differs.
            UnsupportedModelError: the target has nothing that a draft could share.
        """

    def bound(self, runner: TargetRunner) -> BoundLM:
        """The draft for a target; made once a target, and given up with it.

        Raises:
            CheckpointError, UnsupportedModelError: as :meth:`check` does, or weights that cannot be read, or a model
                that cannot be hosted.
        """
        found = self._bound.get(runner)
        if found is None:
            self.check(runner)
            self._bound[runner] = found = self._make(runner)
        return found

    @abstractmethod
    def _make(self, runner: TargetRunner) -> BoundLM:
        """The draft for a target that it was checked against."""


class TrainedLM(SmallLMDraft):
    """One of ours: decoder layers and a final norm, between a target's embedding and rows of its head.

    Attributes:
        sizes: of the decoder, as transformers names them.
        ids: (draft vocabulary,) target id of each draft id; None: the target's whole vocabulary.
    """

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        super().__init__()
        self.folder = Path(folder)
        if contents.kind != KIND:
            raise CheckpointError(f"{folder} holds a draft for {contents.kind or 'another method'}, not for {KIND}.")
        given, length = contents.config.get("model"), contents.config.get("trained_length")
        if not isinstance(given, dict) or not isinstance(length, int) or length < 1:
            raise CheckpointError(
                f"{draft_folder.CONFIG} of {folder} lacks model or trained_length, or they are wrong: copy the draft "
                "again."
            )
        self.sizes, self.trained_length = given, length
        sizes = {n: t.shape for n, t in small_models.decoder(given).state_dict().items()}
        trimmed = contents.config.get("draft_vocab_size")
        if trimmed is not None:
            sizes[OFFSETS] = torch.Size([trimmed])
        tensors = dict(contents.tensors)
        draft_folder.check_tensors(tensors, sizes, folder, KIND)
        offsets = tensors.pop(OFFSETS, None)
        self.ids = None if offsets is None else offsets.long() + torch.arange(len(offsets))
        self.weights = tensors
        self._made_for = DraftFolder(KIND, {}, {}, {"hidden_size": given.get("hidden_size")} | contents.target)

    @property
    def vocabulary(self) -> int | None:
        return None if self.ids is None else len(self.ids)

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in self.weights.values())

    def check(self, runner: TargetRunner) -> None:
        parts = runner.parts
        draft_folder.check_target(self._made_for, parts.description, self.folder)
        if self.ids is not None and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < parts.head.shape[0]:
            raise CheckpointError(
                f"{OFFSETS} of {self.folder} names tokens outside the target's vocabulary of {parts.head.shape[0]}: "
                "the draft is damaged; copy it again."
            )

    def _make(self, runner: TargetRunner) -> BoundLM:
        parts, device, dtype = runner.parts, runner.device, runner.kv_shape.dtype
        ids = None if self.ids is None else self.ids.to(device)
        head = parts.head if ids is None else parts.head[ids]
        weights = {n: t.to(device, dtype) for n, t in self.weights.items()}
        model = small_models.around(self.sizes, weights, parts.embedding, head)
        return BoundLM(TargetRunner(model), ids, self.trained_length)


class PublishedLM(SmallLMDraft):
    """A causal language model of transformers, in a folder or on the hub. Its weights are read when it is bound.

    Its vocabulary has to be the target's. Where both tokenizers can be found, they are compared, and heads may be
    padded to different sizes; where the target's origin is not known, all that can be asked for is the same size.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.folder, self._name = Path(name), name
        self._described = companions.describe(name)
        self.trained_length = self._described.trained_length

    @property
    def parameters(self) -> int:
        return self._described.parameters

    def check(self, runner: TargetRunner) -> None:
        same = companions.same_tokens(self._name, runner)
        mine, its = self._described.vocab_size, runner.vocab_size
        if same is False or (same is None and mine != its):
            why = "its tokenizer numbers tokens otherwise" if same is False else f"it has {mine} tokens, not {its}"
            raise CheckpointError(
                f"{self._name} does not have the target's vocabulary ({why}), so it cannot draft for it. Name a model "
                "of the target's family, or train a draft: longdraft train lm."
            )

    def _make(self, runner: TargetRunner) -> BoundLM:
        model = load_weights(self._name, runner.kv_shape.dtype, runner.device)
        model = companions.fit_vocabulary(model, runner.vocab_size)
        return BoundLM(TargetRunner(model), None, self.trained_length)
