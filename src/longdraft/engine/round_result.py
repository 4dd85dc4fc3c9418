"""The result of a round for one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import TokenTree

# What a target forward does: "prefill" of a prompt; verification on the full KV cache ("full") or on a partial one
# ("partial"); verification on the full KV cache that also recomputes the KV of partial rounds ("refresh": SpecPV).
RoundMode = Literal["prefill", "full", "partial", "refresh"]


@dataclass(frozen=True)
class RoundResult:
    """The result of one target forward for one sequence: the end of its prefill, or a verified tree.

    Attributes:
        sequence: the sequence. Its output already has the emitted tokens.
        tree: the verified tree, rooted at the last token before the round; the root alone if nothing was drafted.
        num_accepted: number of accepted drafted tokens.
        path: the accepted nodes of ``tree``, root first.
        new_token_ids: the emitted tokens: the accepted tokens, then the bonus token.
        mode: the kind of forward. "prefill" is a sequence's first result, after the whole prompt has been read.
        queries: layer -> queries (query heads, tokens, head size) after RoPE, for the drafter's query layers. After
            prefill: of the prompt's last ``num_prompt_queries`` tokens, or fewer if less of the prompt had to be read.
            Later: of the deepest accepted node. The KV store has the KV up to the token of the last query.
        kv_rewritten_from: exact KV replaced approximate KV from this position on; None if no KV was replaced.
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
        """True for the first result of a sequence."""
        return self.mode == "prefill"
