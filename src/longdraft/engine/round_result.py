"""The result of a round for one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import TokenTree

# What a target forward does: prefill; verification on the full KV cache ("full"), or on a partial one; verification on
# the full cache that also recomputes the KV of partial rounds ("refresh": SpecPV, section 3).
RoundMode = Literal["prefill", "full", "partial", "refresh"]


@dataclass(frozen=True)
class RoundResult:
    """The result of one target forward for one sequence: the end of its prefill, or a verified tree.

    Attributes:
        sequence: the sequence, with the emitted tokens appended.
        tree: the verified tree, rooted at the last token before the round; the root alone if nothing was drafted.
        num_accepted: number of accepted drafted tokens.
        path: accepted nodes of ``tree``, root first.
        new_token_ids: emitted tokens: the accepted tokens, then the bonus token.
        mode: the kind of forward. "prefill" is a sequence's first result, after the whole prompt has been read.
        queries: layer -> (query heads, n, head size), after RoPE, for the drafter's query layers. After prefill n is
            ``num_prompt_queries`` (fewer if less of the prompt had to be read), for the prompt's last tokens. Later n
            is 1, for the deepest accepted node. The store has the KV up to the token of the last query.
        kv_rewritten_from: first position whose approximate KV was replaced by exact KV; None if no KV was.
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
