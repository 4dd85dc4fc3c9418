"""Base classes of trained drafts. A draft is weights in a folder, made for one target."""

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
from longdraft.files import file_errors, reports_file_errors
from longdraft.model.quant import draft_copy
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import HeadWeight
from longdraft.model.tensor_parallel import full_tensor

REMEDY = "Correct the value in its config.json, or copy the draft again."
_ID_DTYPES = (torch.int64, torch.int32)  # of the tensor d2t
logger = logging.getLogger("longdraft")
BoundT = TypeVar("BoundT")
DraftT = TypeVar("DraftT", bound="TrainedDraft[Any]")


class Draft(ABC, Generic[BoundT]):
    """Trained weights of a drafter. All runs on a target share one object, which :meth:`bind` makes.

    Attributes:
        kind: name of the kind in config.json, and of the method that drafts with it.
        folder: the folder that the draft was read from, or the hub id.
        trained_length: number of tokens of the longest training example; None if unknown.
        retrieval_layer: the target's layer whose attention ranks chunks of the context best; None if unknown.
        required_target: entries that the target's description must have, by name.
    """

    kind: ClassVar[str]
    loads_hub_files: ClassVar[bool] = True
    """True: for a hub id, ``load`` receives the folder of the downloaded files. False: ``load`` receives the id."""
    trained_length: int | None = None
    retrieval_layer: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wraps a subclass's ``load``. The wrapper downloads a hub id first, and names a bad folder in errors."""
        super().__init_subclass__(**kwargs)
        if (load := vars(cls).get("load")) is not None:

            @reports_file_errors("The draft in", REMEDY)
            @functools.wraps(load.__func__)
            def wrapped(cls: type[Any], folder: Path | str, *args: Any, **options: Any) -> Any:
                return load.__func__(cls, hub.local_folder(folder) if cls.loads_hub_files else folder, *args, **options)

            setattr(cls, "load", classmethod(wrapped))  # noqa: B010

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.required_target: dict[str, Any] = {}
        self._bound: weakref.WeakKeyDictionary[TargetRunner, BoundT] = weakref.WeakKeyDictionary()
        self._warned_of_length = False

    def __repr__(self) -> str:
        length = "" if self.trained_length is None else f", trained on {self.trained_length:,} tokens"
        return f"{type(self).__name__}({str(self.folder)!r}, {self.parameters / 1e6:.1f}M parameters{length})"

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of parameters, without the parameters of the target."""

    @property
    def vocabulary(self) -> int | None:
        """Size of the draft's vocabulary; None: the target's vocabulary."""
        return None

    @abstractmethod
    def check(self, runner: TargetRunner) -> None:
        """Raises CheckpointError if the target differs from the required one; the message says in what.
        Raises UnsupportedModelError if the target has no embedding and head that a draft could share."""

    def remarks(self, runner: TargetRunner) -> list[str]:
        """Returns a sentence for each property of a target that :meth:`check` accepts but that may lower acceptance."""
        return []

    def bind(self, runner: TargetRunner) -> BoundT:
        """Returns the object that drafts for a target, which is made once. Raises the errors of :meth:`check`."""
        bound = self._bound.get(runner)
        if bound is None:
            with file_errors(self.folder, f"The draft in {self.folder} cannot be used", REMEDY):
                self.check(runner)
                self._bound[runner] = bound = self.make(runner)
        return bound

    def warn_beyond_trained_length(self, trained_length: int, seen: str, consequence: str) -> None:
        """Warns, once for each draft, that the draft sees more tokens than it was trained on.

        Args:
            seen: a clause that says how many tokens the draft sees.
            consequence: a clause that says what follows and what to do.
        """
        if not self._warned_of_length:
            self._warned_of_length = True
            logger.warning(
                f"The draft in {self.folder} was trained for texts of {trained_length} tokens; {seen}. Output stays "
                f"exact; {consequence}."
            )

    @abstractmethod
    def make(self, runner: TargetRunner) -> BoundT:
        """Makes the object that drafts for a target. :meth:`bind` calls it after :meth:`check`."""


class TrainedDraft(Draft[BoundT]):
    """A draft that is one torch module. A subclass defines the module and :meth:`make`.
    Raises CheckpointError if the sizes are impossible, or the tensors do not fit the module.

    Args:
        folder: the folder that ``contents`` were read from, for messages.
        contents: config, tensors and target of the folder.

    Attributes:
        config: sizes and settings from config.json.
        weights: the module's state dict, on the CPU.
        draft_to_target_ids: (draft vocabulary,) target id of each draft id; None: the target's full vocabulary.
    """

    label: ClassVar[str] = ""
    """The kind as messages show it, such as "EAGLE-3"; empty: the value of ``kind``."""
    layer_count_key: ClassVar[str] = "decoder_layers"
    """The entry of config.json that counts the module's layers."""
    shape_type: ClassVar[type[Any]]
    """Dataclass of the module's sizes."""
    module_type: ClassVar[type[Any]]
    """Class of the module, which is made from its sizes."""

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        super().__init__(folder)
        self.config = contents.config
        self.trained_length = draft_folder.optional_int(self.config, "trained_length", folder)
        self.retrieval_layer = draft_folder.optional_int(self.config, "retrieval_layer", folder, minimum=0)
        self.weights = dict(contents.tensors)
        for name, tensor in self.weights.items():
            if not (tensor.dtype in _ID_DTYPES if name == D2T else tensor.is_floating_point()):
                raise CheckpointError(f"{name} of {folder} has the wrong dtype {tensor.dtype}: copy the draft again.")
        # Checked before the module is made, so that a damaged number does not make a huge module.
        if (layers := self.config.get(self.layer_count_key) or 0) > len(self.weights):
            raise CheckpointError(
                f"{CONFIG} of {folder} has {self.layer_count_key} {layers}, more than the folder has tensors."
            )
        shapes = {name: t.shape for name, t in self._meta_module().state_dict().items()}
        if (vocab_size := self.config.get("draft_vocab_size")) is not None:
            shapes[D2T] = torch.Size([vocab_size])
        draft_folder.check_tensors(self.weights, shapes, folder, self.label or self.kind)
        d2t = self.weights.pop(D2T, None)
        self.draft_to_target_ids = None if d2t is None else d2t.long() + torch.arange(len(d2t), device="cpu")
        self.required_target = self.needs() | contents.target

    @classmethod
    def load(cls: type[DraftT], folder: Path | str) -> DraftT:
        """Reads a draft folder. Raises CheckpointError if the folder is unreadable, or holds another kind of draft."""
        return cls(folder, draft_folder.load(folder, cls.kind))

    def save(self, folder: Path | str, bits: int | None = None) -> None:
        """Writes the draft and its card to a folder in our layout; ``bits`` and errors: :func:`draft_folder.save`."""
        hub.copy_card(self.folder, Path(folder))
        ids = self.draft_to_target_ids
        d2t = {} if ids is None else {D2T: ids - torch.arange(len(ids), device="cpu")}
        draft_folder.save(folder, DraftFolder(self.kind, self.config, self.weights | d2t, self.required_target), bits)

    @functools.cached_property
    def shape(self) -> Any:
        """The module's sizes."""
        return draft_folder.read_shape(self.shape_type, self.config, self.folder, self.label or self.kind)

    def module(self) -> nn.Module:
        """Makes a module of the sizes in :attr:`config`, without the draft's weights."""
        module: nn.Module = self.module_type(self.shape)
        return module

    def needs(self) -> dict[str, Any]:
        """Returns entries that the target's description must have, even if the folder does not describe a target."""
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
        ids = self.draft_to_target_ids
        if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise CheckpointError(
                f"{D2T} of {self.folder} names tokens outside the target's vocabulary of {size}: the draft is "
                "damaged; copy it again."
            )

    def load_module(self, runner: TargetRunner) -> Any:
        """Returns the module with the draft's weights, in the target's dtype and on the target's device. If that is a
        GPU and the target's layers have few bits a weight, the draft's linear layers get eight."""
        device, dtype = runner.device, runner.kv_shape.dtype
        module = self._meta_module()
        module.load_state_dict({name: t.to(device, dtype) for name, t in self.weights.items()}, assign=True)
        module.requires_grad_(False).eval()
        return draft_copy.round_to_eight_bits(module) if runner.drafts_in_eight_bits else module

    def trainable_module(self) -> Any:
        """Returns the module with the draft's weights in float32, for further training."""
        module = self.module()
        module.load_state_dict({name: t.float() for name, t in self.weights.items()})
        return module

    def head(self, runner: TargetRunner) -> tuple[HeadWeight, torch.Tensor | None]:
        """Returns the rows of the target's head for the draft's vocabulary, (vocabulary, hidden), and the target id of
        each row (None: the rows are all target ids in order)."""
        head, ids = runner.shared_parts.head, self.draft_to_target_ids
        if ids is not None:
            ids = ids.to(runner.device)
            head = full_tensor(head)[ids] if isinstance(head, torch.Tensor) else head.select_rows(ids)
        if isinstance(head, torch.Tensor) and runner.drafts_in_eight_bits:
            head = draft_copy.eight_bit_planes(head)
        return head, ids

    def _meta_module(self) -> nn.Module:
        """Makes the module on the meta device, where tensors take no memory."""
        with torch.device("meta"):
            return self.module()
