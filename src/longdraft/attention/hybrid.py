"""Hybrid tree attention on a GPU (LongSpec, section 3.3) with torch's own kernels.

    prefix   one call for all sequences, without a mask, which also returns the log-sum-exp
    tree     a masked product of the block's rows with the tree's rows, in float32
    merge    the prefix is one more column of the tree's scores: its log-sum-exp is the score, its output the value

Keys and values are read in place: the cache is treated as one list of rows, in which sequence b starts at row
``starts[b]``. The kernels read starts and lengths on the device; the host only gives bounds, so a forward can be
recorded.

In 16 bits the kernel is flash attention. It splits the keys over the whole GPU only if a sequence has one query and
heads share keys. So the rows of a block are passed as heads: all rows of a KV head see the same keys, whatever their
query head, and the keys are then read once. float32 uses the memory-efficient kernel, which does not split keys and
serves for checks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

from longdraft.attention import sdpa, tree_attention
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers
from longdraft.attention.tree_attention import flatten_kv, slot_stride

log = logging.getLogger("longdraft")

# A chain of at least so many rows keeps a GPU busy without splitting its keys.
MIN_CAUSAL_QUERY_LEN = 128
MAX_HEAD_DIM = 256


def unavailable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why torch's kernels cannot run here; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"hybrid uses torch's kernels for NVIDIA GPUs, the model is on {device}; try sdpa"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"hybrid works in float32, float16 and bfloat16, the model is {dtype}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"hybrid takes head sizes up to {MAX_HEAD_DIM} that are multiples of 8, this model's is {head_dim}"
    if dtype != torch.float32 and torch.cuda.is_available():
        if not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch has no flash attention; try sdpa"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "torch's flash attention needs an Ampere GPU or a newer one; try sdpa"
    return None


@dataclass(frozen=True)
class HybridMetadata:
    """Places in the cache of the rows that a forward sees, as device tensors, the same for all layers.

    Attributes:
        slots: (B,) int32.
        starts: (B + 1,) int32, the first row of each prefix in the list of rows; the kernels require one more entry.
        lengths: (B,) int32, rows of each prefix.
        bound: upper bound on the lengths, a host integer. It affects how keys are split, never the result.
        empty: (B, 1, 1) bool, True for a prefix without rows; None if no prefix is empty.
        tree: (B * W,) int32, the tree's rows in the list of rows.
        hidden: (B, 1, 1, T, W) float32, -inf where row i may not see row j of the tree, else 0.
    """

    slots: torch.Tensor
    prefix_starts: torch.Tensor
    prefix_lens: torch.Tensor
    max_prefix_len: int
    is_empty: torch.Tensor | None
    tree_indices: torch.Tensor
    tree_bias: torch.Tensor

    @classmethod
    def build(
        cls,
        keys: torch.Tensor,
        slots: torch.Tensor,
        prefix_lens: torch.Tensor,
        max_prefix_len: int,
        mask: torch.Tensor,
        window_starts: torch.Tensor | None = None,
        none_empty: bool = False,
    ) -> HybridMetadata:
        """The places of prefixes and of the tree behind each.

        Args:
            keys: (slots, Hkv, capacity, d); only its layout is read.
            slots, lengths, begins: (B,) int32: sequence b sees rows [begin, begin + length) of its slot; begins None
                for 0.
            mask: (B, T, W) bool, True where row i may see row j of the W rows behind the prefix; W may be 0.
            filled: True if no prefix is empty.
        """
        prefix_starts = slots * slot_stride(keys)
        if window_starts is not None:
            prefix_starts = prefix_starts + window_starts
        width = mask.shape[2]
        tree_indices = (prefix_starts + prefix_lens).unsqueeze(1) + torch.arange(
            width, dtype=torch.int32, device=slots.device
        )
        tree_bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        tree_bias = tree_bias.masked_fill_(mask.logical_not(), float("-inf"))
        return cls(
            slots=slots,
            prefix_starts=torch.cat([prefix_starts, prefix_starts.narrow(0, 0, 1)]),
            prefix_lens=prefix_lens,
            max_prefix_len=max_prefix_len,
            is_empty=None if none_empty else (prefix_lens == 0).view(-1, 1, 1),
            tree_indices=tree_indices.flatten(),
            tree_bias=tree_bias.unsqueeze(1).unsqueeze(1),
        )


@cache
def _say_once() -> None:
    log.warning("Layers with a window, a soft cap or sinks are computed by torch's masked kernels, not by hybrid.")


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: ForwardBatch,
    scale: float,
    scoring: ScoreModifiers = NO_MODIFIERS,
    /,
) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`, on a GPU; float32, float16 and bfloat16.

    Keys and values have the same layout, and the distance between two slots is a whole number of rows. Layers that this
    does not serve are computed by torch's masked kernels.
    """
    if block.window_starts is not None or scoring is not NO_MODIFIERS or keys.shape[3] != values.shape[3]:
        _say_once()
        return sdpa.attend(q, keys, values, block, scale, scoring)
    chain = block.mask is None
    if block.tree_len == 1 or (chain and block.query_len == 1):  # the row sees everything
        return _prefix(q, keys, values, _places(block, keys, block.tree_len), scale)[0]
    if chain and block.query_len >= MIN_CAUSAL_QUERY_LEN and q.element_size() == 2:
        return _causal(q, keys, values, _places(block, keys, block.tree_len), scale)
    return attend_prefix_and_tree(q, keys, values, _places(block, keys, 0), scale)


def attend_prefix_and_tree(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: HybridMetadata, scale: float
) -> torch.Tensor:
    """Every row attends to its sequence's whole prefix and to the tree rows that it may see: q -> (B, Hq, T, d)."""
    o, lse = _prefix(q, keys, values, metadata, scale)
    if metadata.is_empty is not None:
        # The kernels return infinity or NaN for an empty prefix.
        o, lse = o.masked_fill(metadata.is_empty.unsqueeze(-1), 0), lse.masked_fill(metadata.is_empty, float("-inf"))
    if not metadata.tree_bias.shape[-1]:
        return o
    compute = (
        torch.ops.longdraft.merge_tree_attention
        if tree_attention.uses_kernel(q, keys)
        else tree_attention.merge_tree_attention
    )
    out: torch.Tensor = compute(q, keys, values, o, lse, metadata.tree_indices, metadata.tree_bias, scale)
    return out


def _places(block: ForwardBatch, keys: torch.Tensor, seen: int) -> HybridMetadata:
    """The places of a block, computed by its first layer. The tree's first ``seen`` rows count as prefix."""
    key = "hybrid", slot_stride(keys), seen
    if key not in block.metadata:
        mask = block.mask
        if seen:
            mask = torch.zeros(block.batch_size, block.query_len, 0, dtype=torch.bool, device=keys.device)
        elif mask is None:
            mask = block.tree_mask(0, keys.device).expand(block.batch_size, -1, -1)
        # Prefix attention, of which nothing lies behind the prefix, is to texts with rows.
        filled = seen > 0 or not block.tree_len or (not block.is_captured and min(block.prefix_lens, default=1) > 0)
        prefix_lens = block.prefix_lens_t + seen if seen else block.prefix_lens_t
        max_prefix_len = max(block.prefix_lens, default=0) + seen
        block.metadata[key] = HybridMetadata.build(
            keys, block.slots_t, prefix_lens, max_prefix_len, mask, none_empty=filled
        )
    places: HybridMetadata = block.metadata[key]
    return places


def _prefix(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: HybridMetadata, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row sees the whole prefix: o (B, Hq, T, d) and lse (B, Hq, T) in float32; undefined for an empty one."""
    return (_flash if q.element_size() == 2 else _efficient)(q, keys, values, places, scale)


def _flash(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: HybridMetadata, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, heads, size, d), kv_heads = q.shape, keys.shape[1]
    alone = heads * size == kv_heads
    # (B, Hkv, G*T, d): row g*T + t of a KV head is query head g of its group, block row t.
    folded = q.reshape(batch, kv_heads, -1, d)
    if alone:  # the kernel splits the keys of two rows of a KV head, but not those of one
        folded = folded.expand(-1, -1, 2, -1)
    queries = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    results = torch.ops.aten._flash_attention_forward(
        folded.reshape(batch, -1, d), flatten_kv(keys), flatten_kv(values), queries, places.prefix_starts,
        1, places.max_prefix_len, 0.0, False, False, scale=scale, seqused_k=places.prefix_lens,
    )  # fmt: skip
    o, lse = results[0].view(batch, kv_heads, -1, d), results[1].t().reshape(batch, kv_heads, -1)
    if alone:
        o, lse = o.narrow(2, 0, 1), lse.narrow(2, 0, 1)
    return o.reshape(q.shape), lse.reshape(q.shape[:3])


def _causal(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: HybridMetadata, scale: float
) -> torch.Tensor:
    """The last row sees the whole prefix, each earlier row one row less."""
    batch, heads, size, d = q.shape
    queries = torch.arange(0, (batch + 1) * size, size, dtype=torch.int32, device=q.device)
    results = torch.ops.aten._flash_attention_forward(
        q.transpose(1, 2).reshape(batch * size, heads, d), flatten_kv(keys), flatten_kv(values), queries, places.prefix_starts,
        size, places.max_prefix_len, 0.0, True, False, scale=scale, seqused_k=places.prefix_lens,
    )  # fmt: skip
    out: torch.Tensor = results[0].view(batch, size, heads, d).transpose(1, 2)
    return out


def _efficient(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: HybridMetadata, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, heads, size, d), kv_heads = q.shape, keys.shape[1]
    rows = heads // kv_heads * size
    folded = q.reshape(batch, kv_heads, rows, d).transpose(1, 2).reshape(1, batch * rows, kv_heads, d)
    queries = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=q.device)
    results = torch.ops.aten._efficient_attention_forward(
        folded, flatten_kv(keys).unsqueeze(0), flatten_kv(values).unsqueeze(0), None, queries, places.prefix_starts,
        rows, places.max_prefix_len, 0.0, 0, True, scale=scale, seqlen_k=places.prefix_lens,
    )  # fmt: skip
    o = results[0].view(batch, rows, kv_heads, d).transpose(1, 2)
    # The log-sum-exp is padded to a multiple of 32 rows.
    return o.reshape(q.shape), results[1].narrow(2, 0, rows).reshape(q.shape[:3])
