"""Prefix attention: queries that see every committed row of their slot, and no other rows.

A drafter's cross-attention to the target's KV is of this kind (LongSpec, section 3.1). Every path has the same
contract. It takes q (B, Hq, T, d) after RoPE; keys, values (slots, Hkv, capacity, d) with any strides, Hq a multiple of
Hkv; a block of B sequences with T rows, of which slots and lengths (at least 1) are read; and the softmax scale. It
returns (B, Hq, T, d) in q's dtype. On a GPU one call serves all sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.reference import AttentionFunction

# (q, keys, values, block, scale) -> output
PrefixAttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ForwardBatch, float], torch.Tensor]


def make_prefix_attention(attend: AttentionFunction) -> PrefixAttentionFunction:
    """A path of hybrid tree attention on a block that lies before the prefix's end, so that no row of it is seen."""

    def prefix(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: ForwardBatch, scale: float
    ) -> torch.Tensor:
        nothing = torch.zeros(block.batch_size, block.query_len, 0, dtype=torch.bool, device=q.device)
        return attend(q, keys, values, replace(block, tree_offset=-block.query_len, mask=nothing), scale)

    return prefix
