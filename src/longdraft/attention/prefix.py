"""Prefix attention: queries attend to all committed KV entries of their slot, and to nothing else.

An example is a drafter's cross-attention to the target's KV (LongSpec, section 3.1). Arguments of every path: q
(B, Hq, T, d) after RoPE; keys and values (slots, Hkv, capacity, d) with any strides, Hq a multiple of Hkv; a batch of B
sequences with T tokens, whose slots and prefix_lens (at least 1) are read; the softmax scale. Returns (B, Hq, T, d) in
q's dtype. On a GPU one call computes all sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.reference import AttentionFunction

# (q, keys, values, batch, scale) -> output
PrefixAttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ForwardBatch, float], torch.Tensor]


def make_prefix_attention(attend: AttentionFunction) -> PrefixAttentionFunction:
    """Makes prefix attention of a path of tree attention: the batch's tokens count as the end of the prefix."""

    def attend_prefix(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: ForwardBatch, scale: float
    ) -> torch.Tensor:
        empty_mask = torch.zeros(batch.batch_size, batch.query_len, 0, dtype=torch.bool, device=q.device)
        return attend(q, keys, values, replace(batch, tree_offset=-batch.query_len, mask=empty_mask), scale)

    return attend_prefix
