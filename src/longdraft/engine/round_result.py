"""Events: what a round did to a sequence, for its drafter and for whoever counts, prints, plans or learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import TokenTree

# What logits were computed on: a prompt's own rows; the whole cache; a part of it; the whole cache, correcting what was
# computed on a part (SpecPV, section 3).
RoundMode = Literal["prefill", "full", "partial", "refresh"]


@dataclass(frozen=True)
class RoundResult:
    """One forward of the target, as one sequence went through it. The emitted tokens are in the sequence already.

    Attributes:
        sequence: as its drafter sees it.
        tree: the drafted tree, rooted at the token before; a root alone if nothing was drafted.
        accepted: number of drafted tokens that were right.
        path: the accepted nodes of ``tree``, the root first.
        emitted: the new tokens: the accepted ones, and one that was not drafted.
        mode: what the logits were computed on. "prefill": the prompt has been read and the first token emitted; the
            first event of a sequence.
        queries: layer -> (query heads, n, head size), after RoPE, for the layers that the drafter wants. At first those
            of the prompt's last tokens, as many as its query window says (fewer if a kept cache left fewer to read);
            later those of the deepest accepted node. The store's rows up to the last query's own can be read.
        replaced: first position whose row in the store has been replaced by an exact one; None if none has.
    """

    sequence: Sequence
    tree: TokenTree
    num_accepted: int = 0
    path: tuple[int, ...] = (0,)
    new_token_ids: tuple[int, ...] = ()
    mode: RoundMode = "full"
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)
    kv_rewritten_from: int | None = None

    @property
    def is_prefill(self) -> bool:
        """True for a sequence's first event."""
        return self.mode == "prefill"
