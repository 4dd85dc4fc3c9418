"""An EAGLE-3 draft: read from its folder, checked against a target, and bound to it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from longdraft.drafters import draft_folder, eagle3_formats
from longdraft.drafters.draft_folder import DraftFolder
from longdraft.drafters.eagle3_block import Eagle3Block, Eagle3Shape
from longdraft.drafters.eagle3_formats import KIND, OFFSETS, Eagle3Contents, usual_layers
from longdraft.errors import CheckpointError
from longdraft.few_rows import FewRowsModule
from longdraft.target.rotary import Rotary
from longdraft.target.runner import TargetRunner


@dataclass(frozen=True)
class BoundDraft:
    """A draft in its target's dtype and on its device, with the embedding that it borrows.

    Attributes:
        ids: (draft vocabulary,) target id of each draft id; None where they are the same.
        few_rows: makes the block's layers, its head included, fast on a CPU.
    """

    block: Eagle3Block
    embedding: nn.Module
    rotary: Rotary
    ids: torch.Tensor | None
    few_rows: FewRowsModule


class Eagle3Draft:
    """A trained draft, as its folder holds it. Runs on the same target share what :meth:`bound` makes of it.

    Attributes:
        contents: what the folder says.
        trained_length: tokens of the longest text it was trained on; None where the folder does not say.
        ids: (draft vocabulary,) target id of each draft id; None: the target's whole vocabulary.
    """

    kind = KIND

    def __init__(self, folder: Path | str, contents: Eagle3Contents) -> None:
        self.folder = Path(folder)
        self.contents = contents
        self.trained_length = contents.trained_length
        draft_folder.check_tensors(
            contents.tensors, {n: t.shape for n, t in _empty_block(self.shape).state_dict().items()}, folder, "EAGLE-3"
        )
        for name, number in (("window", contents.window), ("trained_length", contents.trained_length)):
            if number is not None and (type(number) is not int or number < 1):
                raise CheckpointError(f"config.json of {folder} has no number that could be right for {name}.")
        offsets = contents.offsets
        if offsets is not None and offsets.shape != (self.shape.vocabulary,):
            raise CheckpointError(
                f"{OFFSETS} of {folder} has the shape {tuple(offsets.shape)} where {self.shape.vocabulary} tokens need "
                "one offset each: the draft is damaged; copy it again."
            )
        self.ids = None if offsets is None else offsets.long() + torch.arange(len(offsets))
        self._bound: weakref.WeakKeyDictionary[TargetRunner, BoundDraft] = weakref.WeakKeyDictionary()

    @classmethod
    def load(
        cls,
        folder: Path | str,
        rope_theta: float | None = None,
        head_dim: int | None = None,
        rope_factor: float | None = None,
    ) -> Eagle3Draft:
        """Reads a draft folder: ours, a published one, or one of `speculators`.

        Args:
            rope_theta, head_dim: instead of the folder's, which published drafts leave out or misstate.
            rope_factor: stretch the draft's context so many times (YaRN), instead of what the folder says.

        Raises:
            CheckpointError: unreadable, another kind of draft, or tensors missing, unexpected or of a wrong shape.
        """
        return cls(folder, eagle3_formats.read(folder, rope_theta, head_dim, rope_factor))

    @property
    def shape(self) -> Eagle3Shape:
        return self.contents.shape

    @property
    def reach(self) -> int | None:
        """Tokens of context that its positions are good for, YaRN included; None where the folder does not say."""
        rope = self.contents.rope
        if rope["rope_type"] == "yarn":
            return int(float(rope["factor"]) * int(rope["original_max_position_embeddings"]))
        return self.trained_length

    @property
    def window(self) -> int | None:
        """Keys that a query sees, its own included; None: all."""
        return self.contents.window

    @property
    def vocabulary(self) -> int | None:
        return None if self.ids is None else len(self.ids)

    @property
    def retrieval_layer(self) -> int | None:
        """The target's layer by whose attention chunks are best retrieved; None where the folder names none."""
        return draft_folder.retrieval_layer(Path(self.folder))

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in self.contents.tensors.values())

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Decoder layers of the target whose outputs it reads, low to high.

        Raises:
            CheckpointError: the target has no such layers.
        """
        count = runner.kv_shape.layers
        layers = self.contents.feature_layers or usual_layers(count)
        if min(layers) < 0 or max(layers) >= count or list(layers) != sorted(set(layers)):
            raise CheckpointError(
                f"The draft in {self.folder} reads the outputs of layers {', '.join(map(str, layers))} of its target, "
                f"counted from 0; this one has {count}, and they must be there and increase. Load the target it was "
                "trained with, or correct the layers in its config.json."
            )
        return layers

    def check(self, runner: TargetRunner) -> None:
        """Refuses a target that the draft was not made for.

        Raises:
            CheckpointError: saying what differs.
            UnsupportedModelError: the target has nothing that a draft could share.
        """
        parts, shape = runner.parts, self.shape
        made_for = {"hidden_size": shape.hidden_size} | self.contents.target
        draft_folder.check_target(DraftFolder(KIND, {}, {}, made_for), parts.description, self.folder)
        layers = self.feature_layers(runner)
        if shape.feature_size != len(layers) * parts.hidden_size:
            raise CheckpointError(
                f"The draft in {self.folder} reads {shape.feature_size} numbers of a token; {len(layers)} layers of "
                f"this target have {len(layers) * parts.hidden_size}. Load the target it was trained with."
            )
        size = parts.head.shape[0]
        if self.ids is None and shape.vocabulary != size:
            raise CheckpointError(
                f"The draft in {self.folder} knows {shape.vocabulary} tokens, this target {size}, and its weights hold "
                f"no {OFFSETS}, which would say which: copy the draft again."
            )
        if self.ids is not None and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < size:
            raise CheckpointError(
                f"{OFFSETS} of {self.folder} names tokens outside the target's vocabulary of {size}: the draft is "
                "damaged; copy it again."
            )
        self._rotary(torch.float32, "cpu")

    def bound(self, runner: TargetRunner) -> BoundDraft:
        """The draft on a target; made once a target, and given up with it.

        Raises:
            CheckpointError, UnsupportedModelError: as :meth:`check` does.
        """
        found = self._bound.get(runner)
        if found is None:
            self.check(runner)
            device, dtype = runner.device, runner.kv_shape.dtype
            block = _empty_block(self.shape)
            block.load_state_dict({n: t.to(device, dtype) for n, t in self.contents.tensors.items()}, assign=True)
            ids = None if self.ids is None else self.ids.to(device)
            block.requires_grad_(False).eval()
            rotary = self._rotary(dtype, device)
            found = BoundDraft(block, runner.parts.embedding, rotary, ids, FewRowsModule(block))
            self._bound[runner] = found
        return found

    def _rotary(self, dtype: torch.dtype, device: torch.device | str) -> Rotary:
        return Rotary(self.shape.head_dim, self.contents.rope, dtype, device)


def _empty_block(shape: Eagle3Shape) -> Eagle3Block:
    """A block without memory."""
    with torch.device("meta"):
        return Eagle3Block(shape)
