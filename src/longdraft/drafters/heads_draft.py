"""A draft of chained heads: read from its folder, checked against a target, and bound to it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from longdraft.drafters import draft_folder
from longdraft.drafters.draft_folder import CONFIG, DraftFolder
from longdraft.drafters.heads_block import HeadsBlock, HeadsShape
from longdraft.errors import CheckpointError
from longdraft.few_rows import FewRowsLinear
from longdraft.target.runner import TargetRunner

KIND = "heads"
OFFSETS = "d2t"


@dataclass(frozen=True)
class BoundHeads:
    """Heads in their target's dtype and on its device.

    Attributes:
        head: (draft vocabulary, hidden): the target's own, or the rows of it that the draft's vocabulary needs.
        ids: (draft vocabulary,) target id of each draft id; None where they are the same.
    """

    block: HeadsBlock
    head: torch.Tensor
    ids: torch.Tensor | None

    @cached_property
    def _head(self) -> FewRowsLinear:
        return FewRowsLinear(self.head)

    def logits(self, h: torch.Tensor, heads: int) -> torch.Tensor:
        """h (rows, hidden), the target's states -> (rows, heads, draft vocabulary). One product with the head."""
        return self._head(torch.stack(self.block(h, heads), dim=1))


class HeadsDraft:
    """Trained heads, as their folder holds them. Runs on the same target share what :meth:`bound` makes of them.

    Attributes:
        trained_length: tokens of the longest text they were trained on; None where the folder does not say.
        ids: (draft vocabulary,) target id of each draft id; None: the target's whole vocabulary.
    """

    kind = KIND

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        self.folder = Path(folder)
        if contents.kind != KIND:
            raise CheckpointError(f"{folder} holds a draft for {contents.kind or 'another method'}, not for {KIND}.")
        config = contents.config
        self.shape = _shape(contents, folder)
        self.trained_length: int | None = config.get("trained_length")
        sizes = {n: t.shape for n, t in _empty_block(self.shape).state_dict().items()}
        trimmed = config.get("draft_vocab_size")
        if trimmed is not None:
            sizes[OFFSETS] = torch.Size([trimmed])
        tensors = dict(contents.tensors)
        draft_folder.check_tensors(tensors, sizes, folder, KIND)
        offsets = tensors.pop(OFFSETS, None)
        self.ids = None if offsets is None else offsets.long() + torch.arange(len(offsets))
        self.weights = tensors
        self._made_for = DraftFolder(KIND, {}, {}, {"hidden_size": self.shape.hidden_size} | contents.target)
        self._bound: weakref.WeakKeyDictionary[TargetRunner, BoundHeads] = weakref.WeakKeyDictionary()

    @classmethod
    def load(cls, folder: Path | str) -> HeadsDraft:
        """Reads a draft folder.

        Raises:
            CheckpointError: unreadable, another kind of draft, or tensors missing, unexpected or of a wrong shape.
        """
        return cls(folder, draft_folder.load(folder))

    @property
    def vocabulary(self) -> int | None:
        return None if self.ids is None else len(self.ids)

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in self.weights.values())

    def check(self, runner: TargetRunner) -> None:
        """Refuses a target that the heads were not made for.

        Raises:
            CheckpointError: saying what differs.
            UnsupportedModelError: the target has nothing that a draft could share.
        """
        parts = runner.parts
        draft_folder.check_target(self._made_for, parts.description, self.folder)
        size = parts.head.shape[0]
        if self.ids is not None and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < size:
            raise CheckpointError(
                f"{OFFSETS} of {self.folder} names tokens outside the target's vocabulary of {size}: the draft is "
                "damaged; copy it again."
            )

    def bound(self, runner: TargetRunner) -> BoundHeads:
        """The heads on a target; made once a target, and given up with it.

        Raises:
            CheckpointError, UnsupportedModelError: as :meth:`check` does.
        """
        found = self._bound.get(runner)
        if found is None:
            self.check(runner)
            device, dtype = runner.device, runner.kv_shape.dtype
            block = _empty_block(self.shape)
            block.load_state_dict({n: t.to(device, dtype) for n, t in self.weights.items()}, assign=True)
            ids = None if self.ids is None else self.ids.to(device)
            head = runner.parts.head if ids is None else runner.parts.head[ids]
            found = BoundHeads(block.requires_grad_(False).eval(), head, ids)
            self._bound[runner] = found
        return found


def _shape(contents: DraftFolder, folder: Path | str) -> HeadsShape:
    sizes = {name: contents.config.get(name) for name in ("hidden_size", "heads", "rms_norm_eps")}
    wrong = [n for n in ("hidden_size", "heads") if type(sizes[n]) is not int or not sizes[n] > 0]  # type: ignore[operator]
    eps = sizes["rms_norm_eps"]
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        wrong.append("rms_norm_eps")
    if wrong:
        raise CheckpointError(f"{CONFIG} of {folder} has no number that could be right for {', '.join(wrong)}.")
    return HeadsShape(**sizes)  # type: ignore[arg-type]


def _empty_block(shape: HeadsShape) -> HeadsBlock:
    """A block without memory."""
    with torch.device("meta"):
        return HeadsBlock(shape)
