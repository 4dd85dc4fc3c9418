"""Prefix attention: queries attend to all committed KV entries of their slot, and to nothing else.

An example is a drafter's cross-attention to the target's KV (LongSpec, section 3.1). Arguments: q (B, Hq, T, d) after
RoPE; keys and values (slots, Hkv, capacity, d) with any strides, Hq a multiple of Hkv; a batch of B sequences with T
tokens, of which only slots and prefix_lens (at least 1) are read; the softmax scale. The result is (B, Hq, T, d) in q's
dtype. On a GPU one call computes all sequences.
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
    """Makes prefix attention from a path of tree attention."""

    def attend_prefix(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: ForwardBatch, scale: float
    ) -> torch.Tensor:
        # tree_offset + T = 0 tree tokens: only the prefix is left.
        empty_mask = torch.zeros(batch.batch_size, batch.query_len, 0, dtype=torch.bool, device=q.device)
        return attend(q, keys, values, replace(batch, tree_offset=-batch.query_len, mask=empty_mask), scale)

    return attend_prefix
