"""A LongSpec draft: read from its folder, checked against a target, and bound to it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from longdraft.drafters import draft_folder
from longdraft.drafters.draft_folder import DraftFolder
from longdraft.drafters.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.errors import CheckpointError, UnsupportedModelError
from longdraft.few_rows import FewRowsLinear, FewRowsModule
from longdraft.target.parts import SharedParts
from longdraft.target.runner import TargetRunner

KIND = "longspec"
OFFSETS = "d2t"
# Published drafts carry these; the block never uses what they compute.
_DEAD = {f"cross_attn.{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")}
# How transformers' configurations name what we name otherwise.
_PUBLISHED = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}


@dataclass(frozen=True)
class BoundDraft:
    """A draft in its target's dtype and on its device, with what it borrows from the target.

    Attributes:
        head: (draft vocabulary, hidden): the target's own, or the rows of it that the draft's vocabulary needs.
        ids: (draft vocabulary,) target id of each draft id; None where they are the same.
        few_rows: makes the block's layers fast on a CPU.
    """

    block: LongSpecBlock
    parts: SharedParts
    head: torch.Tensor
    ids: torch.Tensor | None
    few_rows: FewRowsModule

    @cached_property
    def _head(self) -> FewRowsLinear:
        return FewRowsLinear(self.head)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) -> (rows, draft vocabulary)."""
        return self._head(hidden)


class LongSpecDraft:
    """A trained draft, as its folder holds it. Runs on the same target share what :meth:`bound` makes of it.

    Attributes:
        trained_length: tokens of the longest text it was trained on; None where the folder does not say.
        ids: (draft vocabulary,) target id of each draft id; None: the target's whole vocabulary.
    """

    kind = KIND

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        self.folder = Path(folder)
        published = not contents.kind
        if contents.kind not in ("", KIND):
            raise CheckpointError(f"{folder} holds a draft for {contents.kind}, not for {KIND}.")
        self.shape = _shape(contents.config, published, folder)
        self.trained_length: int | None = contents.config.get("trained_length")
        tensors = {n: t for n, t in contents.tensors.items() if n not in _DEAD}
        sizes = {n: t.shape for n, t in _empty_block(self.shape).state_dict().items()}
        trimmed = contents.config.get("draft_vocab_size")
        if trimmed is not None:
            sizes[OFFSETS] = torch.Size([trimmed])
        draft_folder.check_tensors(tensors, sizes, folder, "LongSpec")
        offsets = tensors.pop(OFFSETS, None)
        self.ids = None if offsets is None else offsets.long() + torch.arange(len(offsets))
        self._state = tensors
        self._contents = DraftFolder(KIND, {}, {}, self._made_for(contents, published))
        self._bound: weakref.WeakKeyDictionary[TargetRunner, BoundDraft] = weakref.WeakKeyDictionary()

    @classmethod
    def load(cls, folder: Path | str) -> LongSpecDraft:
        """Reads a draft folder, ours or one as LongSpec's authors published them.

        Raises:
            CheckpointError: unreadable, another kind of draft, or tensors missing, unexpected or of a wrong shape.
        """
        return cls(folder, draft_folder.load(folder))

    def _made_for(self, contents: DraftFolder, published: bool) -> dict[str, Any]:
        """What has to be the same of a target: its KV is read with the draft's heads."""
        shape = self.shape
        sizes = {n: getattr(shape, n) for n in ("hidden_size", "heads", "kv_heads", "head_dim")}
        if published and contents.config.get("vocab_size") is not None:
            sizes["vocab_size"] = contents.config["vocab_size"]
        return sizes | contents.target

    @property
    def vocabulary(self) -> int | None:
        return None if self.ids is None else len(self.ids)

    @property
    def retrieval_layer(self) -> int | None:
        """The target's layer by whose attention chunks are best retrieved; None where the folder names none."""
        return draft_folder.retrieval_layer(Path(self.folder))

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in self._state.values())

    def check(self, runner: TargetRunner) -> None:
        """Refuses a target that the draft was not made for.

        Raises:
            CheckpointError: saying what differs.
            UnsupportedModelError: the target has nothing that a draft could share.
        """
        parts = runner.parts
        draft_folder.check_target(self._contents, parts.description, self.folder)
        cos, _ = parts.rotary(torch.zeros(1, dtype=torch.long, device=runner.device))
        if cos.shape[-1] != self.shape.head_dim:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} rotates {cos.shape[-1]} of {self.shape.head_dim} dimensions of a head; "
                "LongSpec drafts share rotary embeddings of whole heads only. Use another method: prompt-lookup."
            )
        if self.ids is not None and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < parts.head.shape[0]:
            raise CheckpointError(
                f"{OFFSETS} of {self.folder} names tokens outside the target's vocabulary of {parts.head.shape[0]}: "
                "the draft is damaged; copy it again."
            )

    def bound(self, runner: TargetRunner) -> BoundDraft:
        """The draft on a target; made once a target, and given up with it.

        Raises:
            CheckpointError, UnsupportedModelError: as :meth:`check` does.
        """
        found = self._bound.get(runner)
        if found is None:
            self.check(runner)
            parts, device, dtype = runner.parts, runner.device, runner.kv_shape.dtype
            block = _empty_block(self.shape)
            block.load_state_dict({n: t.to(device, dtype) for n, t in self._state.items()}, assign=True)
            ids = None if self.ids is None else self.ids.to(device)
            head = parts.head if ids is None else parts.head[ids]
            found = BoundDraft(block.requires_grad_(False).eval(), parts, head, ids, FewRowsModule(block))
            self._bound[runner] = found
        return found


def _shape(config: Mapping[str, Any], published: bool, folder: Path | str) -> LongSpecShape:
    """Sizes from a config.json, by our names or by those of transformers."""
    given = dict(config)
    if published:
        given |= {ours: config[theirs] for ours, theirs in _PUBLISHED.items() if config.get(theirs) is not None}
        # As transformers fills them in.
        given.setdefault("kv_heads", given.get("heads"))
        if not given.get("head_dim") and given.get("hidden_size") and given.get("heads"):
            given["head_dim"] = given["hidden_size"] // given["heads"]
    known = {f.name: given[f.name] for f in fields(LongSpecShape) if given.get(f.name) is not None}
    missing = [n for n in ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim") if n not in known]
    if missing:
        names = [_PUBLISHED.get(n, n) if published else n for n in missing]
        raise CheckpointError(f"config.json of {folder} lacks {', '.join(names)}: is it a LongSpec draft?")
    known["final_norm"] = bool(known.get("final_norm", False))
    numbers = {n: x for n, x in known.items() if n != "final_norm"}
    wrong = [
        n for n, x in numbers.items() if not isinstance(x, int | float) or x <= 0 or (n != "rms_norm_eps" and x % 1)
    ]
    if wrong:
        raise CheckpointError(f"config.json of {folder} has no number that could be right for {', '.join(wrong)}.")
    return LongSpecShape(**known)


def _empty_block(shape: LongSpecShape) -> LongSpecBlock:
    """A block without memory."""
    with torch.device("meta"):
        return LongSpecBlock(shape)
