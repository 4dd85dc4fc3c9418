"""The result of a round for one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import TokenTree

# The KV that the logits were computed with: prefill; the full cache; a partial cache; the full cache after partial
# rounds, whose KV it recomputes (SpecPV, section 3).
RoundMode = Literal["prefill", "full", "partial", "refresh"]


@dataclass(frozen=True)
class RoundResult:
    """What one target forward did for one sequence: prefill, or the verification of a tree.

    Attributes:
        sequence: the sequence, which has the emitted tokens already.
        tree: the verified tree, rooted at the last token before the round; a root alone if nothing was drafted.
        num_accepted: accepted drafted tokens.
        path: accepted nodes of ``tree``, root first.
        new_token_ids: emitted tokens: the accepted ones, and the bonus token.
        mode: the kind of forward. A sequence's first result is "prefill": its prompt has been read.
        queries: layer -> (query heads, n, head size), after RoPE, for the drafter's query layers. In prefill those of
            the prompt's last ``num_prompt_queries`` tokens (fewer if a cached prefix leaves fewer to read), later that
            of the deepest accepted node. The store has the KV up to the token of the last query.
        kv_rewritten_from: first position whose approximate KV was replaced by exact KV; None without.
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
        """True for a sequence's first result."""
        return self.mode == "prefill"
