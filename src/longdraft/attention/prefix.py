"""Computes prefix attention: queries attend to all committed KV entries of a sequence, and to no tree.

An example is a drafter's cross-attention to the target's KV (LongSpec, section 3.1). Arguments and results are those of
:func:`longdraft.attention.reference.attend`, without modifiers. Of the batch, only slots and prefix_lens (at least 1)
count. On a GPU one call computes all sequences.
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
    """Makes a function for prefix attention from a path of tree attention."""

    def attend_prefix(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: ForwardBatch, scale: float
    ) -> torch.Tensor:
        # The tree then has tree_offset + query_len = 0 tokens: only the prefix is left.
        empty_mask = torch.zeros(batch.batch_size, batch.query_len, 0, dtype=torch.bool, device=q.device)
        return attend(q, keys, values, replace(batch, tree_offset=-batch.query_len, mask=empty_mask), scale)

    return attend_prefix
