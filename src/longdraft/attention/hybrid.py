"""Computes hybrid tree attention on a GPU (LongSpec, section 3.3) with torch's own kernels, in three steps:

    prefix   all tokens attend to the prefixes in one call without a mask, which also returns the log-sum-exp (lse)
    tree     the new tokens attend to the tree under a mask, in float32
    merge    the prefix counts as one more key of the tree: its lse is the score, its output the value

The cache is viewed as one flat list of KV entries, so keys and values are read in place. Starts and lengths of prefixes
are tensors on the device, and kernels get only upper bounds from the host, so a CUDA graph can capture the forward.

In 16 bits the prefix's kernel is torch's flash attention. It splits keys over the whole GPU only if a sequence has one
query token and several query heads for each KV head. So all query tokens are passed as query heads of one token, and
each key is read once. In float32, for tests, the kernel is torch's memory-efficient attention, which never splits keys.
Shapes: B sequences, T new tokens each, W tokens in each tree, Hq query heads, Hkv KV heads, head size d.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

from longdraft.attention import sdpa, tree_attention
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers
from longdraft.attention.tree_attention import flatten_kv, slot_stride

logger = logging.getLogger("longdraft")

MIN_CAUSAL_QUERY_LEN = 128  # the shortest chain that keeps a GPU busy without splitting the keys
MAX_HEAD_DIM = 256


def why_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why hybrid attention cannot run here; None if it can."""
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
    """Tells where the prefixes and trees of a forward lie in the flat KV cache. All layers share these tensors.

    Attributes:
        slots: (B,) int32.
        prefix_starts: (B + 1,) int32, flat index of each prefix's first entry. The kernels want a last, unused element.
        counts: (B + 1,) int32, the numbers 0 to B.
        prefix_lens: (B,) int32.
        max_prefix_len: upper bound on prefix_lens, a host integer. The kernels split keys by it.
        tree_indices: (B * W,) int32, flat indices of the tree's entries.
        tree_bias: (B, 1, 1, T, W) float32, -inf where token i may not attend to tree token j, else 0.
    """

    slots: torch.Tensor
    prefix_starts: torch.Tensor
    counts: torch.Tensor
    prefix_lens: torch.Tensor
    max_prefix_len: int
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
        kv_starts: torch.Tensor | None = None,
    ) -> HybridMetadata:
        """Builds the metadata of a batch of prefixes, each with a tree behind it.

        Args:
            keys: (slots, Hkv, capacity, d). Only the layout is read.
            slots, prefix_lens, kv_starts: (B,) int32. The prefix of sequence b is [kv_start, kv_start + prefix_len) in
                the sequence's slot, and the tree follows. ``kv_starts`` of None: all start at 0.
            mask: (B, T, W) bool, True where token i may attend to token j of the tree; W may be 0, without empty
                prefixes.
        """
        prefix_starts = slots * slot_stride(keys)
        if kv_starts is not None:
            prefix_starts = prefix_starts + kv_starts
        tree_offsets = torch.arange(mask.shape[2], dtype=torch.int32, device=slots.device)
        tree_indices = (prefix_starts + prefix_lens).unsqueeze(1) + tree_offsets
        tree_bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        tree_bias = tree_bias.masked_fill_(mask.logical_not(), float("-inf"))
        return cls(
            slots=slots,
            prefix_starts=torch.cat([prefix_starts, prefix_starts.narrow(0, 0, 1)]),
            counts=torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
            prefix_lens=prefix_lens,
            max_prefix_len=max_prefix_len,
            tree_indices=tree_indices.flatten(),
            tree_bias=tree_bias.unsqueeze(1).unsqueeze(1),
        )


@cache
def _warn_once() -> None:
    logger.warning("Layers with a window, soft cap or sinks run on torch's SDPA with a mask, not on hybrid attention.")


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    /,
) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`, on a GPU in float32, float16 or bfloat16.

    Keys and values must have equal layouts, and the stride of a slot must be a multiple of the stride of an entry.
    torch's SDPA with a mask computes layers that hybrid attention does not support.
    """
    if batch.window_starts is not None or modifiers is not NO_MODIFIERS or keys.shape[3] != values.shape[3]:
        _warn_once()
        return sdpa.attend(q, keys, values, batch, scale, modifiers)
    is_chain = batch.mask is None
    if batch.tree_len == 1 or (is_chain and batch.query_len == 1):  # every token sees all keys
        return _prefix_attention(q, keys, values, _metadata_of(batch, keys, batch.tree_len), scale)[0]
    if is_chain and batch.query_len >= MIN_CAUSAL_QUERY_LEN and q.element_size() == 2:
        return _causal_attention(q, keys, values, _metadata_of(batch, keys, batch.tree_len), scale)
    return attend_prefix_and_tree(q, keys, values, _metadata_of(batch, keys, 0), scale)


def attend_prefix_and_tree(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: HybridMetadata, scale: float
) -> torch.Tensor:
    """Attends to prefix and tree, and merges the results. Returns (B, Hq, T, d)."""
    o, lse = _prefix_attention(q, keys, values, metadata, scale)
    if not metadata.tree_bias.shape[-1]:
        return o
    kernel_op, reference_op = torch.ops.longdraft.merge_tree_attention, tree_attention.merge_tree_attention
    merge = kernel_op if tree_attention.uses_kernel(q, keys) else reference_op
    tree = metadata.prefix_lens, metadata.tree_indices, metadata.tree_bias
    out: torch.Tensor = merge(q, keys, values, o, lse, *tree, scale)
    return out


def _metadata_of(batch: ForwardBatch, keys: torch.Tensor, num_prefix_tokens: int) -> HybridMetadata:
    """Returns a batch's metadata, which the first layer builds. ``num_prefix_tokens`` tree tokens count as prefix."""
    key = "hybrid", slot_stride(keys), num_prefix_tokens
    if key not in batch.metadata:
        mask = batch.mask
        if num_prefix_tokens:
            mask = torch.zeros(batch.batch_size, batch.query_len, 0, dtype=torch.bool, device=keys.device)
        elif mask is None:
            mask = batch.tree_mask(0, keys.device).expand(batch.batch_size, -1, -1)
        prefix_lens = batch.prefix_lens_t + num_prefix_tokens if num_prefix_tokens else batch.prefix_lens_t
        max_prefix_len = max(batch.prefix_lens, default=0) + num_prefix_tokens
        batch.metadata[key] = HybridMetadata.build(keys, batch.slots_t, prefix_lens, max_prefix_len, mask)
    metadata: HybridMetadata = batch.metadata[key]
    return metadata


def _prefix_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: HybridMetadata, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends to the prefix. Returns the output (B, Hq, T, d) and float32 lse (B, Hq, T), undefined if it is empty."""
    return (_flash_attention if q.element_size() == 2 else _efficient_attention)(q, keys, values, metadata, scale)


def _flash_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: HybridMetadata, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch_size, heads, query_len, d), kv_heads = q.shape, keys.shape[1]
    is_single_query = heads * query_len == kv_heads
    # (B, Hkv, heads // kv_heads * T, d): row g*T + t of a KV head is its query head g, token t.
    folded = q.reshape(batch_size, kv_heads, -1, d)
    if is_single_query:  # the kernel splits keys only if a KV head has two queries or more
        folded = folded.expand(-1, -1, 2, -1)
    results = torch.ops.aten._flash_attention_forward(
        folded.reshape(batch_size, -1, d), flatten_kv(keys), flatten_kv(values), metadata.counts,
        metadata.prefix_starts, 1, metadata.max_prefix_len, 0.0, False, False, scale=scale,
        seqused_k=metadata.prefix_lens,
    )  # fmt: skip  # max_q, max_k, dropout_p, is_causal, return_debug_mask, ...
    o, lse = results[0].view(batch_size, kv_heads, -1, d), results[1].t().reshape(batch_size, kv_heads, -1)
    if is_single_query:
        o, lse = o.narrow(2, 0, 1), lse.narrow(2, 0, 1)
    return o.reshape(q.shape), lse.reshape(q.shape[:3])


def _causal_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: HybridMetadata, scale: float
) -> torch.Tensor:
    """Attends causally: the last token sees all of the prefix, each earlier token one entry less."""
    batch_size, heads, query_len, d = q.shape
    cu_seqlens = torch.arange(0, (batch_size + 1) * query_len, query_len, dtype=torch.int32, device=q.device)
    results = torch.ops.aten._flash_attention_forward(
        q.transpose(1, 2).reshape(batch_size * query_len, heads, d), flatten_kv(keys), flatten_kv(values),
        cu_seqlens, metadata.prefix_starts, query_len, metadata.max_prefix_len, 0.0, True, False,
        scale=scale, seqused_k=metadata.prefix_lens,
    )  # fmt: skip
    out: torch.Tensor = results[0].view(batch_size, query_len, heads, d).transpose(1, 2)
    return out


def _efficient_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: HybridMetadata, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch_size, heads, query_len, d), kv_heads = q.shape, keys.shape[1]
    rows = heads // kv_heads * query_len
    folded = q.reshape(batch_size, kv_heads, rows, d).transpose(1, 2).reshape(1, batch_size * rows, kv_heads, d)
    cu_seqlens = torch.arange(0, (batch_size + 1) * rows, rows, dtype=torch.int32, device=q.device)
    results = torch.ops.aten._efficient_attention_forward(
        folded, flatten_kv(keys).unsqueeze(0), flatten_kv(values).unsqueeze(0), None, cu_seqlens,
        metadata.prefix_starts, rows, metadata.max_prefix_len, 0.0, 0, True, scale=scale, seqlen_k=metadata.prefix_lens,
    )  # fmt: skip
    o = results[0].view(batch_size, rows, kv_heads, d).transpose(1, 2)
    # The kernel pads the log-sum-exp to a multiple of 32 rows.
    return o.reshape(q.shape), results[1].narrow(2, 0, rows).reshape(q.shape[:3])
