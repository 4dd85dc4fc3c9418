"""Bases of all kinds of trained drafts: weights in a folder, made for one target."""

from __future__ import annotations

import functools
import logging
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from longdraft.drafts import draft_folder, hub
from longdraft.drafts.draft_folder import CONFIG, D2T, DraftFolder
from longdraft.errors import CheckpointError
from longdraft.files import file_errors, reads
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import full_tensor
from longdraft.native.quantized_matrix import QuantizedMatrix

REMEDY = "A value that cannot be right can be corrected in its config.json; otherwise copy the draft again."
_IDS = (torch.int64, torch.int32)
logger = logging.getLogger("longdraft")
Bound = TypeVar("Bound")
Own = TypeVar("Own", bound="TrainedDraft[Any]")


class Draft(ABC, Generic[Bound]):
    """Trained weights of a drafter. Runs on the same target share the result of :meth:`bind`.

    Attributes:
        kind: what a folder's config.json calls it, and the method that drafts with it.
        folder: the folder it was read from, or a hub id as given.
        trained_length: tokens of the longest text it was trained on; None if the folder does not say.
        retrieval_layer: the target's layer whose attention ranks chunks best; None if the folder names none.
        required_target: entries of the target's description that must be equal, by name.
    """

    kind: ClassVar[str]
    loads_hub_files: ClassVar[bool] = True
    """``load`` gets the folder of a hub id's files, not the id."""
    trained_length: int | None = None
    retrieval_layer: int | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        """Makes ``load`` a boundary: whatever a bad folder sets off is an error that names it. A hub id is fetched."""
        super().__init_subclass__(**named)
        if (load := vars(cls).get("load")) is not None:

            def loaded(own: type[Any], folder: Path | str, *args: Any, **options: Any) -> Any:
                return load.__func__(own, hub.local_folder(folder) if own.loads_hub_files else folder, *args, **options)

            setattr(cls, "load", classmethod(reads("The draft in", REMEDY)(functools.wraps(load.__func__)(loaded))))  # noqa: B010

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.required_target: dict[str, Any] = {}
        self._bound: weakref.WeakKeyDictionary[TargetRunner, Bound] = weakref.WeakKeyDictionary()
        self._outgrown = False  # whether that was said

    def __repr__(self) -> str:
        length = "" if self.trained_length is None else f", trained on {self.trained_length:,} tokens"
        return f"{type(self).__name__}({str(self.folder)!r}, {self.parameters / 1e6:.1f}M parameters{length})"

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Count of parameters in its own tensors, without those shared with the target."""

    @property
    def vocabulary(self) -> int | None:
        """Tokens it can propose; None: all of the target's."""
        return None

    @abstractmethod
    def check(self, runner: TargetRunner) -> None:
        """Refuses a target that the draft was not made for.

        Raises:
            CheckpointError: saying what differs.
            UnsupportedModelError: the target has nothing that a draft could share.
        """

    def remarks(self, runner: TargetRunner) -> list[str]:
        """Warnings about an accepted target, a sentence each: they cost acceptance, not correctness."""
        return []

    def bind(self, runner: TargetRunner) -> Bound:
        """The draft on a target, made once and freed with the target.

        Raises:
            CheckpointError, UnsupportedModelError: as :meth:`check` does, or as :meth:`make` does.
        """
        found = self._bound.get(runner)
        if found is None:
            with file_errors(self.folder, f"The draft in {self.folder} cannot be used", REMEDY):
                self.check(runner)
                self._bound[runner] = found = self.make(runner)
        return found

    def warn_beyond_trained_length(self, trained_length: int, seen: str, consequence: str) -> None:
        """Warns, once a draft and not once a run, that it sees more tokens than it was trained for.

        Args:
            what: how many it sees. then: what follows, and what to do.
        """
        if not self._outgrown:
            self._outgrown = True
            logger.warning(
                f"The draft in {self.folder} was trained for texts of {trained_length} tokens; {seen}. Output stays exact; "
                f"{consequence}."
            )

    @abstractmethod
    def make(self, runner: TargetRunner) -> Bound:
        """Makes the object that drafts on a target, after :meth:`check`."""


class TrainedDraft(Draft[Bound]):
    """A draft that is one module, in a folder of ours. A subclass defines the module and what :meth:`make` returns.

    Args:
        folder: the folder that the contents were read from, for messages.
        contents: config, tensors and target of the folder.

    Attributes:
        config: sizes and settings of the folder's config.json.
        weights: the module's state dict, on the CPU.
        draft_to_target_ids: (draft vocabulary,) target id of each draft id; None: the target's whole vocabulary.

    Raises:
        CheckpointError: another kind of draft, sizes that make no module, or tensors that are not the module's.
    """

    label: ClassVar[str] = ""
    """The kind in messages, where its name is not enough: "EAGLE-3"."""
    layer_count_key: ClassVar[str] = "decoder_layers"
    """The number in its configuration of parts that have tensors each."""
    shape_type: ClassVar[type[Any]]
    """The dataclass of the module's sizes."""
    module_type: ClassVar[type[Any]]
    """The module, made of its sizes."""

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        super().__init__(folder)
        self.config = contents.config
        self.trained_length = draft_folder.optional_int(self.config, "trained_length", folder)
        self.retrieval_layer = draft_folder.optional_int(self.config, "retrieval_layer", folder, minimum=0)
        self.weights = dict(contents.tensors)
        for name, tensor in self.weights.items():
            if not (tensor.dtype in _IDS if name == D2T else tensor.is_floating_point()):
                raise CheckpointError(f"{name} of {folder} holds numbers of the type {tensor.dtype}: copy it again.")
        if (parts := self.config.get(self.layer_count_key) or 0) > len(self.weights):
            raise CheckpointError(f"{CONFIG} of {folder} has {self.layer_count_key} {parts}, more than tensors.")
        sizes = {name: t.shape for name, t in self._empty().state_dict().items()}
        if (trimmed := self.config.get("draft_vocab_size")) is not None:
            sizes[D2T] = torch.Size([trimmed])
        draft_folder.check_tensors(self.weights, sizes, folder, self.label or self.kind)
        offsets = self.weights.pop(D2T, None)
        self.draft_to_target_ids = (
            None if offsets is None else offsets.long() + torch.arange(len(offsets), device="cpu")
        )
        self.required_target = self.needs() | contents.target

    @classmethod
    def load(cls: type[Own], folder: Path | str) -> Own:
        """Reads a draft folder.

        Raises:
            CheckpointError: unreadable, another kind of draft, or tensors missing, unexpected or of a wrong shape.
        """
        return cls(folder, draft_folder.load(folder, cls.kind))

    def save(self, folder: Path | str, bits: int | None = None) -> None:
        """Writes the draft to a folder, in our layout, with its card and the record of its training.

        Args:
            bits: 8 or 4 packs its matrices; None: in the dtype they have.

        Raises:
            CheckpointError: it cannot be written.
            ValueError: other bits.
        """
        hub.copy_card(self.folder, Path(folder))
        table = (
            {}
            if self.draft_to_target_ids is None
            else {D2T: self.draft_to_target_ids - torch.arange(len(self.draft_to_target_ids), device="cpu")}
        )
        draft_folder.save(folder, DraftFolder(self.kind, self.config, self.weights | table, self.required_target), bits)

    @functools.cached_property
    def shape(self) -> Any:
        """The module's sizes."""
        return draft_folder.read_shape(self.shape_type, self.config, self.folder, self.label or self.kind)

    def module(self) -> nn.Module:
        """The module that :attr:`config` describes, without its weights."""
        module: nn.Module = self.module_type(self.shape)
        return module

    def needs(self) -> dict[str, Any]:
        """Entries of a target's description that must match even if the folder names no target."""
        return {}

    @property
    def vocabulary(self) -> int | None:
        return None if self.draft_to_target_ids is None else len(self.draft_to_target_ids)

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in self.weights.values())

    def check(self, runner: TargetRunner) -> None:
        draft_folder.check_target(self.required_target, runner.shared_parts.description, self.folder)
        size = runner.shared_parts.head.shape[0]
        if (
            self.draft_to_target_ids is not None
            and not 0 <= int(self.draft_to_target_ids.min()) <= int(self.draft_to_target_ids.max()) < size
        ):
            raise CheckpointError(
                f"{D2T} of {self.folder} names tokens outside the target's vocabulary of {size}: the draft is "
                "damaged; copy it again."
            )

    def load_module(self, runner: TargetRunner) -> Any:
        """The module with its weights, in a target's dtype and on its device."""
        device, dtype = runner.device, runner.kv_shape.dtype
        module = self._empty()
        module.load_state_dict({name: t.to(device, dtype) for name, t in self.weights.items()}, assign=True)
        return module.requires_grad_(False).eval()

    def trainable_module(self) -> Any:
        """The module with its weights in float32, to be trained further."""
        module = self.module()
        module.load_state_dict({name: t.float() for name, t in self.weights.items()})
        return module

    def head(self, runner: TargetRunner) -> tuple[torch.Tensor | QuantizedMatrix, torch.Tensor | None]:
        """The target's head (draft vocabulary, hidden), and the target id of each row; None: all tokens, in order."""
        head: torch.Tensor | QuantizedMatrix = runner.shared_parts.head
        if self.draft_to_target_ids is None:
            return head, None
        ids = self.draft_to_target_ids.to(runner.device)
        return (head.select_rows(ids) if isinstance(head, QuantizedMatrix) else full_tensor(head)[ids]), ids

    def _empty(self) -> nn.Module:
        """The module on the meta device, which takes no memory."""
        with torch.device("meta"):
            return self.module()
