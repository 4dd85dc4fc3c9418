"""Batch-invariant tree attention: keys are summed in a fixed order (``deterministic=True``).

A token of rank r attends to the r keys before it and its own. Plain decoding finds all of them in the prefix, a
verification finds the last ones among the token's ancestors in the tree. Tiles of keys, and splits of tiles, are cut at
fixed ranks. So a token's sums are the same in both.

    full tiles of the prefix    read once for all tokens
    the rest, and ancestors     gathered for each token, added to the running sums of the last split
    splits                      merged one after another; splits behind a token are empty and add nothing

``longdraft::fixed_order_attention`` is defined here and runs so on a CPU; on a GPU it is :mod:`.fixed_order_kernel`.
"""

from __future__ import annotations

import functools
import importlib.util
import math

import torch

from longdraft.attention import custom_ops
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers
from longdraft.errors import CapabilityError
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.native.int8_kv import Int8KV

# Keys of a tile in the reference implementation.
TILE = 16
# Keys of a split: small enough to fill a GPU at 16K tokens, large enough to have few partial results at 128K.
SPLIT = 1024
MAX_HEAD_DIM = 256


def unavailable(dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why it cannot run on a GPU; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "its attention is a Triton kernel: `pip install longdraft[gpu]`"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its attention works in float32, float16 and bfloat16, the model is {dtype}"
    if head_dim > MAX_HEAD_DIM:
        return f"its attention takes head sizes up to {MAX_HEAD_DIM}, this model's is {head_dim}"
    return None


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    /,
) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`, for full attention without score modifiers.

    Raises:
        CapabilityError: a layer with a sliding window, a soft cap, sinks, or values whose head size differs from the
            keys'; or an int8 KV cache.
    """
    if isinstance(keys, Int8KV):
        raise CapabilityError(
            "deterministic=True reads keys and values in the model's dtype: leave it out, or take views in that dtype."
        )
    if modifiers is not NO_MODIFIERS or batch.window_starts is not None or keys.shape[3] != values.shape[3]:
        raise CapabilityError(
            "deterministic=True supports layers with full attention and plain scores only, and this model has others: "
            "leave it out."
        )
    ancestors, num_ancestors = ancestor_lists(batch, q.device)
    max_kv_len = max(batch.prefix_lens, default=0) + batch.tree_len
    out: torch.Tensor = torch.ops.longdraft.fixed_order_attention(
        q, keys, values, batch.slots_t, batch.prefix_lens_t, ancestors, num_ancestors, max_kv_len, scale
    )
    return out


def ancestor_lists(batch: ForwardBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each token's path in the tree, itself the last; computed by the first layer.

    Returns:
        (B, T, W) int32 tree indices, and (B, T) int32, how many of them are the path.
    """
    key = "fixed order"
    if key not in batch.metadata:
        mask = batch.mask
        if mask is None:
            mask = batch.tree_mask(0, device).expand(batch.batch_size, -1, -1)
        order = torch.sort(mask.logical_not().to(torch.int8), dim=-1, stable=True).indices
        batch.metadata[key] = order.int(), mask.sum(-1, dtype=torch.int32)
    lists: tuple[torch.Tensor, torch.Tensor] = batch.metadata[key]
    return lists


def fixed_order_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    ancestors: torch.Tensor,
    num_ancestors: torch.Tensor,
    max_kv_len: int,
    scale: float,
) -> torch.Tensor:
    """Attention of each token to its prefix and to its path in the tree.

    Args:
        q: (B, Hq, T, d).
        keys, values: (slots, Hkv, capacity, d), any strides.
        slots, prefix_lens: (B,) int32, the slot of each sequence and the length of its prefix.
        ancestors: (B, T, W) int32; the first num_ancestors[b, t] are the tree tokens that token t attends to, in order.
        max_kv_len: upper bound on prefix_len + tree_len, a host integer; it never affects the result.

    Returns:
        (B, Hq, T, d) in q's dtype.
    """
    (batch_size, _, query_len, d), kv_heads = q.shape, keys.shape[1]
    queries = q.float().reshape(batch_size, kv_heads, -1, query_len, 1, d)
    n, kv_lens = prefix_lens.view(-1, 1, 1), (prefix_lens.unsqueeze(1) + num_ancestors).unsqueeze(-1)
    running_max = torch.full(queries.shape[:4], -math.inf, **CPU_FLOAT32)
    running_sum, acc = torch.zeros(queries.shape[:4], **CPU_FLOAT32), torch.zeros(*queries.shape[:4], d, **CPU_FLOAT32)
    slot_index = slots.long().view(-1, 1, 1)
    for start in range(0, int(kv_lens.max()) if batch_size else 0, TILE):
        ranks = torch.arange(start, start + TILE, device="cpu").view(1, 1, -1)
        seen = (ranks < kv_lens).view(batch_size, 1, 1, query_len, TILE)
        # A rank below n is an entry of the prefix, one from n on an ancestor in the tree.
        tree_rank = (ranks - n).clamp(0, ancestors.shape[2] - 1).expand(batch_size, query_len, -1)
        entries = torch.where(ranks < n, ranks, n + ancestors.gather(2, tree_rank))
        entries = torch.where(ranks < kv_lens, entries, 0).long()
        k, v = (x.transpose(1, 2)[slot_index, entries].float() for x in (keys, values))
        k, v = (x.permute(0, 3, 1, 2, 4).unsqueeze(2) for x in (k, v))
        scores = ((queries * k).sum(-1) * scale).masked_fill(~seen, -math.inf)
        new_max = torch.maximum(running_max, scores.amax(-1))
        weights, decay = torch.exp(scores - new_max.unsqueeze(-1)), torch.exp(running_max - new_max)
        v = v.masked_fill(~seen.unsqueeze(-1), 0)
        running_sum = running_sum * decay + weights.sum(-1)
        acc = acc * decay.unsqueeze(-1) + (weights.unsqueeze(-1) * v).sum(-2)
        running_max = torch.where(seen.any(-1), new_max, running_max)
    return (acc / running_sum.unsqueeze(-1)).to(q.dtype).reshape(q.shape)


custom_ops.define_op(fixed_order_attention, "longdraft.attention.fixed_order_kernel")


@functools.cache
@torch.no_grad()
def check_batch_invariance(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> None:
    """Compares the tokens of a chain with the same tokens one by one, on random keys. The first call waits for the GPU.

    Raises:
        CapabilityError: they differ.
    """
    kv_heads, prefix_len, query_len = 2, 2 * SPLIT - 9, 24  # the tokens lie on both sides of a split boundary
    generator = torch.Generator().manual_seed(0)
    shapes = (1, kv_heads * group, query_len, head_dim), *[(1, kv_heads, prefix_len + 2 * query_len, head_dim)] * 2
    q, keys, values = (torch.randn(shape, generator=generator, **CPU_FLOAT32).to(device, dtype) for shape in shapes)
    chain_out = attend(q, keys, values, ForwardBatch.make([0], [prefix_len], query_len, device=device), head_dim**-0.5)
    for i in (0, 1, query_len // 2, query_len - 1):
        # Stands for a plain step: token i comes first, and the padding behind it attends to itself alone.
        rolled = q.roll(-i, 2)
        mask = torch.eye(query_len, dtype=torch.bool, device="cpu")[None]
        batch = ForwardBatch.make([0], [prefix_len + i], query_len, mask, device)
        single_out = attend(rolled, keys, values, batch, head_dim**-0.5)
        if not torch.equal(single_out[:, :, 0], chain_out[:, :, i]):
            raise CapabilityError(
                "deterministic=True does not work on this GPU: attention gives a token other bits in a verification "
                "than alone. Leave it out, and report the GPU and Triton's version."
            )
