"""Computes batch-invariant tree attention: adds up keys in a fixed order (``deterministic=True``).

A token of rank r attends to r earlier keys and to its own. In plain decoding all these keys are in the prefix. In a
verification the last keys are those of the token's path in the tree (ancestors and token). Keys are added up in tiles,
and tiles in splits. Tiles and splits begin at fixed ranks, so a token gets equal sums in both cases. Three kernels run:

    prefix_attention   reads the full tiles of the prefix, once for all tokens
    path_attention     gathers each token's other keys, and adds them to the last split
    merge_splits       merges splits in order; splits behind a token's last key are empty and add nothing

The operator ``longdraft::fixed_order_attention`` runs the kernels on a GPU, and a reference without splits on a CPU.
Shapes: B sequences, T new tokens each, W tokens in each tree, Hq query heads, Hkv KV heads, head size d.
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
from longdraft.native.quantized_kv import QuantizedKV

TILE = 16  # keys of a tile in the reference
# Keys of a split: few enough that 16K tokens occupy a GPU, many enough that 128K tokens have few partial results.
SPLIT = 1024
MAX_HEAD_DIM = 256


def why_unavailable(dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why fixed-order attention cannot run on a GPU, to complete a message about it; None if it can."""
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
            keys'; or a quantized KV cache.
    """
    if isinstance(keys, QuantizedKV):
        raise CapabilityError(
            "deterministic=True cannot read a quantized KV cache: leave out deterministic, or the option for its dtype."
        )
    if modifiers is not NO_MODIFIERS or batch.window_starts is not None or keys.shape[3] != values.shape[3]:
        raise CapabilityError(
            "deterministic=True supports no sliding windows, soft caps, sinks, or values of another head size, and "
            "this model has one of them: leave it out."
        )
    paths, path_lens = tree_paths(batch, q.device)
    max_kv_len = max(batch.prefix_lens, default=0) + batch.tree_len
    out: torch.Tensor = torch.ops.longdraft.fixed_order_attention(
        q, keys, values, batch.slots_t, batch.prefix_lens_t, paths, path_lens, max_kv_len, scale
    )
    return out


def tree_paths(batch: ForwardBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes each token's path in the tree (ancestors, then the token itself), once for all layers of a forward.

    Returns:
        (B, T, W) int32, the tree indices of each path, padded with other indices; (B, T) int32, the paths' lengths.
    """
    key = "fixed order"
    if key not in batch.metadata:
        mask = batch.mask
        if mask is None:
            mask = batch.tree_mask(0, device).expand(batch.batch_size, -1, -1)
        # A stable sort puts the attended tokens first, in order.
        order = torch.sort(mask.logical_not().to(torch.int8), dim=-1, stable=True).indices
        batch.metadata[key] = order.int(), mask.sum(-1, dtype=torch.int32)
    paths_and_lens: tuple[torch.Tensor, torch.Tensor] = batch.metadata[key]
    return paths_and_lens


def fixed_order_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    paths: torch.Tensor,
    path_lens: torch.Tensor,
    max_kv_len: int,
    scale: float,
) -> torch.Tensor:
    """Computes the attention of each token to the sequence's prefix and to the token's path in the tree.

    Args:
        q: (B, Hq, T, d).
        keys, values: the KV cache (slots, Hkv, capacity, d), any strides.
        slots, prefix_lens: (B,) int32, the slot and the prefix length of each sequence.
        paths, path_lens: as :func:`tree_paths` returns.
        max_kv_len: upper bound on prefix_len + W, a host integer that never affects the result.

    Returns:
        (B, Hq, T, d) in q's dtype.
    """
    (batch_size, _, query_len, d), kv_heads = q.shape, keys.shape[1]
    queries = q.float().reshape(batch_size, kv_heads, -1, query_len, 1, d)
    n, kv_lens = prefix_lens.view(-1, 1, 1), (prefix_lens.unsqueeze(1) + path_lens).unsqueeze(-1)
    running_max = torch.full(queries.shape[:4], -math.inf, **CPU_FLOAT32)
    running_sum, acc = torch.zeros(queries.shape[:4], **CPU_FLOAT32), torch.zeros(*queries.shape[:4], d, **CPU_FLOAT32)
    slot_index = slots.long().view(-1, 1, 1)
    for start in range(0, int(kv_lens.max()) if batch_size else 0, TILE):
        ranks = torch.arange(start, start + TILE, device="cpu").view(1, 1, -1)
        visible = (ranks < kv_lens).view(batch_size, 1, 1, query_len, TILE)
        # Ranks below n (the prefix length) are entries of the prefix; later ranks are tokens of the path.
        path_rank = (ranks - n).clamp(0, paths.shape[2] - 1).expand(batch_size, query_len, -1)
        entries = torch.where(ranks < n, ranks, n + paths.gather(2, path_rank))
        entries = torch.where(ranks < kv_lens, entries, 0).long()
        k, v = (x.transpose(1, 2)[slot_index, entries].float() for x in (keys, values))
        k, v = (x.permute(0, 3, 1, 2, 4).unsqueeze(2) for x in (k, v))
        scores = ((queries * k).sum(-1) * scale).masked_fill(~visible, -math.inf)
        new_max = torch.maximum(running_max, scores.amax(-1))
        weights, decay = torch.exp(scores - new_max.unsqueeze(-1)), torch.exp(running_max - new_max)
        v = v.masked_fill(~visible.unsqueeze(-1), 0)
        running_sum = running_sum * decay + weights.sum(-1)
        acc = acc * decay.unsqueeze(-1) + (weights.unsqueeze(-1) * v).sum(-2)
        running_max = torch.where(visible.any(-1), new_max, running_max)
    return (acc / running_sum.unsqueeze(-1)).to(q.dtype).reshape(q.shape)


custom_ops.define_op(fixed_order_attention, "longdraft.attention.fixed_order_kernel")


@functools.cache
@torch.no_grad()
def check_batch_invariance(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> None:
    """Checks that a token of a chain gets the same bits as alone, on random keys, with ``group`` query heads a KV head.

    Waits for the GPU once. Raises CapabilityError if bits differ.
    """
    kv_heads, prefix_len, query_len = 2, 2 * SPLIT - 9, 24  # 9 of the 24 tokens lie before a split boundary
    generator = torch.Generator().manual_seed(0)
    shapes = (1, kv_heads * group, query_len, head_dim), *[(1, kv_heads, prefix_len + 2 * query_len, head_dim)] * 2
    q, keys, values = (torch.randn(shape, generator=generator, **CPU_FLOAT32).to(device, dtype) for shape in shapes)
    chain_out = attend(q, keys, values, ForwardBatch.make([0], [prefix_len], query_len, device=device), head_dim**-0.5)
    for i in (0, 1, query_len // 2, query_len - 1):
        # As in plain decoding, token i is the first new token. All others are padding that attends to itself.
        rolled_q = q.roll(-i, 2)
        mask = torch.eye(query_len, dtype=torch.bool, device="cpu")[None]
        batch = ForwardBatch.make([0], [prefix_len + i], query_len, mask, device)
        out_alone = attend(rolled_q, keys, values, batch, head_dim**-0.5)
        if not torch.equal(out_alone[:, :, 0], chain_out[:, :, i]):
            raise CapabilityError(
                "deterministic=True does not work on this GPU: attention gives a token different bits in a "
                "verification than alone. Leave it out, and report the GPU and Triton's version."
            )
