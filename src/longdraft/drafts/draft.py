"""What a trained draft is: weights in a folder, made for one target. Every kind of draft is built on these bases."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from longdraft.drafts import draft_folder
from longdraft.drafts.draft_folder import CONFIG, OFFSETS, DraftFolder
from longdraft.errors import CheckpointError
from longdraft.model.runner import TargetRunner
from longdraft.model.sharded import whole
from longdraft.native.stored import Stored

Bound = TypeVar("Bound")
Own = TypeVar("Own", bound="TrainedDraft[Any]")


class Draft(ABC, Generic[Bound]):
    """Trained weights of a drafter. Runs on the same target share what :meth:`bound` makes of them.

    Attributes:
        kind: what a folder's config.json calls it, and the method that drafts with it.
        folder: where it was read from; a hub id stands as it was given.
        trained_length: tokens of the longest text it was trained on; None where the folder does not say.
        made_for: what must be the same of a target, by names of its description.
    """

    kind: ClassVar[str]
    trained_length: int | None = None

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.made_for: dict[str, Any] = {}
        self._bound: weakref.WeakKeyDictionary[TargetRunner, Bound] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        length = "" if self.trained_length is None else f", trained on {self.trained_length:,} tokens"
        return f"{type(self).__name__}({str(self.folder)!r}, {self.parameters / 1e6:.1f}M parameters{length})"

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Numbers in its own tensors; what it shares with the target does not count."""

    @property
    def vocabulary(self) -> int | None:
        """Tokens it can propose; None: all of the target's."""
        return None

    @property
    def retrieval_layer(self) -> int | None:
        """The target's layer by whose attention chunks are best retrieved; None where the folder names none."""
        return draft_folder.retrieval_layer(self.folder)

    @abstractmethod
    def check(self, runner: TargetRunner) -> None:
        """Refuses a target that the draft was not made for.

        Raises:
            CheckpointError: saying what differs.
            UnsupportedModelError: the target has nothing that a draft could share.
        """

    def remarks(self, runner: TargetRunner) -> list[str]:
        """What looks wrong beside a target that :meth:`check` lets through, a sentence each: it costs acceptance."""
        return []

    def bound(self, runner: TargetRunner) -> Bound:
        """The draft on a target; made once a target, and given up with it.

        Raises:
            CheckpointError, UnsupportedModelError: as :meth:`check` does, or as :meth:`make` does.
        """
        found = self._bound.get(runner)
        if found is None:
            self.check(runner)
            self._bound[runner] = found = self.make(runner)
        return found

    @abstractmethod
    def make(self, runner: TargetRunner) -> Bound:
        """What drafts on a target that the draft was checked against."""


class TrainedDraft(Draft[Bound]):
    """A draft that is one module, in a folder of ours. A kind says what its module is, and what drafts with it.

    Args:
        folder: where the contents were read from, for messages.
        contents: what the folder holds.

    Attributes:
        config: sizes and settings of the folder's config.json.
        weights: the module's state dict, on the CPU.
        ids: (draft vocabulary,) target id of each draft id; None: the target's whole vocabulary.

    Raises:
        CheckpointError: another kind of draft, sizes that make no module, or tensors that are not the module's.
    """

    label: ClassVar[str] = ""
    """What messages call the kind where its name is not enough: "EAGLE-3"."""

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        super().__init__(folder)
        if contents.kind != self.kind:
            raise CheckpointError(
                f"{folder} holds a draft for {contents.kind or 'another method'}, not for {self.kind}."
            )
        self.config = contents.config
        self.trained_length = length = self.config.get("trained_length")
        if length is not None and (type(length) is not int or length < 1):
            raise CheckpointError(f"{CONFIG} of {folder} has no number that could be right for trained_length.")
        self.weights = dict(contents.tensors)
        sizes = {name: t.shape for name, t in self._empty().state_dict().items()}
        if (trimmed := self.config.get("draft_vocab_size")) is not None:
            sizes[OFFSETS] = torch.Size([trimmed])
        draft_folder.check_tensors(self.weights, sizes, folder, self.label or self.kind)
        offsets = self.weights.pop(OFFSETS, None)
        self.ids = None if offsets is None else offsets.long() + torch.arange(len(offsets))
        self.made_for = self.needs() | contents.target

    @classmethod
    def load(cls: type[Own], folder: Path | str) -> Own:
        """Reads a draft folder.

        Raises:
            CheckpointError: unreadable, another kind of draft, or tensors missing, unexpected or of a wrong shape.
        """
        return cls(folder, draft_folder.load(folder))

    def save(self, folder: Path | str) -> None:
        """Writes the draft to a folder, in our layout.

        Raises:
            CheckpointError: it cannot be written.
        """
        table = {} if self.ids is None else {OFFSETS: self.ids - torch.arange(len(self.ids))}
        draft_folder.save(folder, DraftFolder(self.kind, self.config, self.weights | table, self.made_for))

    @abstractmethod
    def module(self) -> nn.Module:
        """The module that :attr:`config` describes; its weights are put in later."""

    def needs(self) -> dict[str, Any]:
        """What must be the same of a target even where the folder does not name one, by names of its description."""
        return {}

    @property
    def vocabulary(self) -> int | None:
        return None if self.ids is None else len(self.ids)

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in self.weights.values())

    def check(self, runner: TargetRunner) -> None:
        draft_folder.check_target(self.made_for, runner.parts.description, self.folder)
        size = runner.parts.head.shape[0]
        if self.ids is not None and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < size:
            raise CheckpointError(
                f"{OFFSETS} of {self.folder} names tokens outside the target's vocabulary of {size}: the draft is "
                "damaged; copy it again."
            )

    def placed(self, runner: TargetRunner) -> Any:
        """The module with its weights, in a target's dtype and on its device."""
        device, dtype = runner.device, runner.kv_shape.dtype
        module = self._empty()
        module.load_state_dict({name: t.to(device, dtype) for name, t in self.weights.items()}, assign=True)
        return module.requires_grad_(False).eval()

    def trainable(self) -> Any:
        """The module with its weights in float32, to be trained further."""
        module = self.module()
        module.load_state_dict({name: t.float() for name, t in self.weights.items()})
        return module

    def head(self, runner: TargetRunner) -> tuple[torch.Tensor | Stored, torch.Tensor | None]:
        """The target's head (draft vocabulary, hidden), and the target id of each of its rows; None: all, in order."""
        head: torch.Tensor | Stored = runner.parts.head
        if self.ids is None:
            return head, None
        ids = self.ids.to(runner.device)
        return (head.rows(ids) if isinstance(head, Stored) else whole(head)[ids]), ids

    def _empty(self) -> nn.Module:
        """The module without memory."""
        try:
            with torch.device("meta"):
                return self.module()
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{CONFIG} of {self.folder} lacks what describes a {self.label or self.kind} draft, or has a value "
                f"that cannot be right ({error!r}): copy the draft again."
            ) from error
