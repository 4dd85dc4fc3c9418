"""A LongSpec draft: read from its folder, checked against a target, and bound to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from longdraft.drafters.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.drafters.whole_level import WholeLevel, products_of, serves
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.draft_folder import PUBLISHED, DraftFolder, filled_in, shape_of
from longdraft.errors import UnsupportedModelError
from longdraft.model.few_rows import FewRowsModule
from longdraft.model.runner import TargetRunner
from longdraft.model.sharded import product
from longdraft.model.shared_parts import SharedParts
from longdraft.native import Kernels
from longdraft.native.draft import DraftBlock
from longdraft.native.stored import Stored

KIND = "longspec"
# Published drafts carry these; the block never uses what they compute.
_DEAD = {f"cross_attn.{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")}


@dataclass(frozen=True)
class BoundDraft:
    """A draft in its target's dtype and on its device, with what it borrows from the target.

    Attributes:
        head: (draft vocabulary, hidden): the target's own, or the rows of it that the draft's vocabulary needs.
        ids: (draft vocabulary,) target id of each draft id; None where they are the same.
        whole: computes levels in one call, where kernels do.
        few_rows: makes the block's layers fast on a CPU.
    """

    block: LongSpecBlock
    parts: SharedParts
    head: torch.Tensor | Stored
    ids: torch.Tensor | None
    whole: WholeLevel | None
    few_rows: FewRowsModule

    @cached_property
    def _head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return product(self.head)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) -> (rows, draft vocabulary)."""
        return self._head(hidden)


class LongSpecDraft(TrainedDraft[BoundDraft]):
    """A trained draft, ours or one as LongSpec's authors published them."""

    kind, label = KIND, "LongSpec"

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        theirs = contents.kind == KIND and "longdraft_format" not in contents.config
        super().__init__(folder, _as_ours(folder, contents) if theirs else contents)

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
        head, ids = self.head(runner)
        found = serves(runner, self.shape.head_dim)
        whole = None if found is None else _whole(found, block, head)
        return BoundDraft(block, runner.parts, head, ids, whole, FewRowsModule(block))


def _whole(found: Kernels, block: LongSpecBlock, head: torch.Tensor | Stored) -> WholeLevel:
    own, cross, mlp, shape = block.self_attn, block.cross_attn, block.mlp, block.shape
    norms: dict[str, torch.Tensor] = {
        "norm": block.input_layernorm.weight,
        "cross_norm": block.post_self_attention_layernorm.weight,
        "mlp_norm": block.post_cross_attention_layernorm.weight,
    }
    if shape.final_norm:
        norms["final_norm"] = block.norm.get_parameter("weight")
    layers = {
        **{"q": own.q_proj, "k": own.k_proj, "v": own.v_proj, "o": own.o_proj},
        **{"cross_q": cross.q_proj, "cross_o": cross.o_proj},
        **{"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj},
    }
    sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.rms_norm_eps
    return WholeLevel(found, DraftBlock(norms, products_of(layers, head=head), *sizes))


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
