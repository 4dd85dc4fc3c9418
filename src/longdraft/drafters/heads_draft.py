"""A draft of chained heads: read from its folder, checked against a target, and bound to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from longdraft.drafters.heads_block import HeadsBlock, HeadsShape
from longdraft.drafters.whole_level import serves
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.draft_folder import shape_of
from longdraft.model.runner import TargetRunner
from longdraft.model.sharded import product
from longdraft.native.rounded import Rounded, light
from longdraft.native.stored import Stored

KIND = "heads"


@dataclass(frozen=True)
class BoundHeads:
    """Heads in their target's dtype and on its device.

    Attributes:
        head: (draft vocabulary, hidden): the target's own, or the rows of it that the draft's vocabulary needs; rounded
            where kernels serve.
        ids: (draft vocabulary,) target id of each draft id; None where they are the same.
    """

    block: HeadsBlock
    head: torch.Tensor | Stored | Rounded
    ids: torch.Tensor | None

    @cached_property
    def _head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return product(self.head)

    def logits(self, h: torch.Tensor, heads: int) -> torch.Tensor:
        """h (rows, hidden), the target's states -> (rows, heads, draft vocabulary). One product with the head."""
        return self._head(torch.stack(self.block(h, heads), dim=1))


class HeadsDraft(TrainedDraft[BoundHeads]):
    """Trained heads, as their folder holds them."""

    kind = KIND

    @cached_property
    def shape(self) -> HeadsShape:
        return shape_of(HeadsShape, self.config, self.folder, KIND)

    def module(self) -> HeadsBlock:
        return HeadsBlock(self.shape)

    def needs(self) -> dict[str, Any]:
        return {"hidden_size": self.shape.hidden_size}

    def make(self, runner: TargetRunner) -> BoundHeads:
        head, ids = self.head(runner)
        found = serves(runner, runner.kv_shape.head_dim)
        return BoundHeads(self.placed(runner), head if found is None else light(head), ids)
