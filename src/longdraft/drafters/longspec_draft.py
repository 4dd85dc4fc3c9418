"""A LongSpec draft: read from its folder, checked against a target, and bound to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from longdraft.drafters.draft import TrainedDraft
from longdraft.drafters.draft_folder import PUBLISHED, DraftFolder, filled_in, is_language_model, shape_of
from longdraft.drafters.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.errors import UnsupportedModelError
from longdraft.few_rows import FewRowsLinear, FewRowsModule
from longdraft.host.parts import SharedParts
from longdraft.host.runner import TargetRunner

KIND = "longspec"
# Published drafts carry these; the block never uses what they compute.
_DEAD = {f"cross_attn.{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")}


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


class LongSpecDraft(TrainedDraft[BoundDraft]):
    """A trained draft, ours or one as LongSpec's authors published them."""

    kind, label = KIND, "LongSpec"

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        super().__init__(folder, contents if contents.kind else _as_ours(folder, contents))

    @cached_property
    def shape(self) -> LongSpecShape:
        return shape_of(LongSpecShape, self.config, self.folder, self.label)

    def module(self) -> LongSpecBlock:
        return LongSpecBlock(self.shape)

    def needs(self) -> dict[str, Any]:
        """The target's KV is read with the draft's heads."""
        return {n: getattr(self.shape, n) for n in ("hidden_size", "heads", "kv_heads", "head_dim")}

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        check_rotary(runner)

    def make(self, runner: TargetRunner) -> BoundDraft:
        block = self.placed(runner)
        return BoundDraft(block, runner.parts, *self.head(runner), FewRowsModule(block))


def check_rotary(runner: TargetRunner) -> None:
    """Raises UnsupportedModelError for a target whose rotary embedding a draft cannot share."""
    cos, _ = runner.parts.rotary(torch.zeros(1, dtype=torch.long, device=runner.device))
    if cos.shape[-1] != (size := runner.kv_shape.head_dim):
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} rotates {cos.shape[-1]} of {size} dimensions of a head; LongSpec drafts "
            "share rotary embeddings of whole heads only. Use another method: prompt-lookup."
        )


def _as_ours(folder: Path | str, published: DraftFolder) -> DraftFolder:
    """A published draft by our names: transformers calls its sizes otherwise, and leaves some out."""
    config = filled_in(published.config)
    shape = shape_of(LongSpecShape, config, folder, "LongSpec", PUBLISHED)
    ours = shape.as_dict() | {n: config[n] for n in ("trained_length", "draft_vocab_size") if n in config}
    target = {} if config.get("vocab_size") is None else {"vocab_size": config["vocab_size"]}
    tensors = {name: t for name, t in published.tensors.items() if name not in _DEAD}
    return DraftFolder(KIND, ours, tensors, target | published.target)


def claims(folder: Path | str) -> bool:
    """Published drafts do not say what they are."""
    return not is_language_model(folder)
