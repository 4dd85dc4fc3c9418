"""Attention that adds up a row's keys in an order that depends on the row's rank alone (``deterministic=True``).

A token of rank r sees the r keys before it and its own, wherever they lie: plain decoding finds them all in the prefix,
a verification finds the last ones on the row's path in the tree. Keys are taken in tiles of one size, cut at fixed
ranks, and tiles in splits, cut at fixed ranks too. So the row's sums are the same sums in both.

    whole tiles of the prefix   read once for all rows
    the rest, and the path      gathered for each row, behind the running sums of the last split
    splits                      joined one after another; those behind a row add nothing

``longdraft::fixed_order_attention`` has its definition here, which serves on a CPU; on a GPU it is
:mod:`.fixed_order_kernel`.
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

# Keys of a tile in the definition.
TILE = 16
# Keys of a split: enough to fill a GPU at 16K, few enough partial results at 128K.
SPLIT = 1024
MAX_HEAD_DIM = 256


def unavailable(dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why it cannot run on a GPU; None if it can."""
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
    block: ForwardBatch,
    scale: float,
    scoring: ScoreModifiers = NO_MODIFIERS,
    /,
) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`, for plain scores of whole texts.

    Raises:
        CapabilityError: a layer with a window, a soft cap, sinks, or values of another size than its keys; or rows in
            eight bits.
    """
    if isinstance(keys, Int8KV):
        raise CapabilityError(
            "deterministic=True reads keys and values in the model's dtype: leave it out, or take views in that dtype."
        )
    if scoring is not NO_MODIFIERS or block.window_starts is not None or keys.shape[3] != values.shape[3]:
        raise CapabilityError(
            "deterministic=True is for layers that see the whole text, with plain scores; this model has others: "
            "leave it out."
        )
    paths, counts = ancestor_lists(block, q.device)
    bound = max(block.prefix_lens, default=0) + block.tree_len
    out: torch.Tensor = torch.ops.longdraft.fixed_order_attention(
        q, keys, values, block.slots_t, block.prefix_lens_t, paths, counts, bound, scale
    )
    return out


def ancestor_lists(block: ForwardBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, W) and (B, T) int32: the tree's rows on the way to each row, and how many; made by the first layer."""
    key = "fixed order"
    if key not in block.metadata:
        mask = block.mask
        if mask is None:
            mask = block.tree_mask(0, device).expand(block.batch_size, -1, -1)
        order = torch.sort(mask.logical_not().to(torch.int8), dim=-1, stable=True).indices
        block.metadata[key] = order.int(), mask.sum(-1, dtype=torch.int32)
    found: tuple[torch.Tensor, torch.Tensor] = block.metadata[key]
    return found


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
    """Attention to each prefix and to the path behind it.

    Args:
        q: (B, Hq, T, d).
        keys, values: (slots, Hkv, capacity, d), any strides.
        slots, lengths: (B,) int32, slot and rows of each prefix.
        ancestors: (B, T, W) int32, the first counts[b, t] of which are the tree rows that row t sees, in order.
        max_kv_len: upper bound on prefix and tree, a host integer; it never affects the result.

    Returns:
        (B, Hq, T, d) in q's dtype.
    """
    (batch, _, size, d), kv_heads = q.shape, keys.shape[1]
    rows = q.float().reshape(batch, kv_heads, -1, size, 1, d)
    n, ends = prefix_lens.view(-1, 1, 1), (prefix_lens.unsqueeze(1) + num_ancestors).unsqueeze(-1)
    top = torch.full(rows.shape[:4], -math.inf, **CPU_FLOAT32)
    total, acc = torch.zeros(rows.shape[:4], **CPU_FLOAT32), torch.zeros(*rows.shape[:4], d, **CPU_FLOAT32)
    at_slots = slots.long().view(-1, 1, 1)
    for start in range(0, int(ends.max()) if batch else 0, TILE):
        ranks = torch.arange(start, start + TILE, device="cpu").view(1, 1, -1)
        seen = (ranks < ends).view(batch, 1, 1, size, TILE)
        behind = (ranks - n).clamp(0, ancestors.shape[2] - 1).expand(batch, size, -1)
        places = torch.where(ranks < n, ranks, n + ancestors.gather(2, behind))
        places = torch.where(ranks < ends, places, 0).long()
        k, v = (x.transpose(1, 2)[at_slots, places].float().permute(0, 3, 1, 2, 4).unsqueeze(2) for x in (keys, values))
        scores = ((rows * k).sum(-1) * scale).masked_fill(~seen, -math.inf)
        new = torch.maximum(top, scores.amax(-1))
        weights, decay = torch.exp(scores - new.unsqueeze(-1)), torch.exp(top - new)
        v = v.masked_fill(~seen.unsqueeze(-1), 0)
        total = total * decay + weights.sum(-1)
        acc = acc * decay.unsqueeze(-1) + (weights.unsqueeze(-1) * v).sum(-2)
        top = torch.where(seen.any(-1), new, top)
    return (acc / total.unsqueeze(-1)).to(q.dtype).reshape(q.shape)


custom_ops.define_op(fixed_order_attention, "longdraft.attention.fixed_order_kernel")


@functools.cache
@torch.no_grad()
def check_batch_invariance(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> None:
    """Compares rows of a chain with the same rows one by one, on made-up keys. Waits for the device, the first time.

    Raises:
        CapabilityError: they differ.
    """
    kv_heads, before, size = 2, 2 * SPLIT - 9, 24  # the rows lie on both sides of a split's end
    generator = torch.Generator().manual_seed(0)
    shapes = (1, kv_heads * group, size, head_dim), *[(1, kv_heads, before + 2 * size, head_dim)] * 2
    q, keys, values = (torch.randn(shape, generator=generator, **CPU_FLOAT32).to(device, dtype) for shape in shapes)
    together = attend(q, keys, values, ForwardBatch.make([0], [before], size, device=device), head_dim**-0.5)
    for i in (0, 1, size // 2, size - 1):
        # In the place of a plain step: the first of as many rows, of which the others see themselves alone.
        moved = q.roll(-i, 2)
        mask = torch.eye(size, dtype=torch.bool, device="cpu")[None]
        alone = attend(moved, keys, values, ForwardBatch.make([0], [before + i], size, mask, device), head_dim**-0.5)
        if not torch.equal(alone[:, :, 0], together[:, :, i]):
            raise CapabilityError(
                "deterministic=True does not work on this GPU: attention gives a row other bits in a verification "
                "than alone. Leave it out, and report the GPU and Triton's version."
            )
