"""The tokens of one draft forward, and their self-attention over the draft's KV cache.

On a GPU one call computes the attention of all sequences, with all indices on the device, so that a CUDA graph can
capture the call. On other devices attention is computed sequence by sequence.

Shapes: B sequences; W tokens of each sequence, of which the last T have outputs; S cache entries to which a mask
applies, the last ones that a sequence attends to; d the size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from longdraft.attention import hybrid
from longdraft.attention.sdpa import attend_sequence
from longdraft.attention.transfer import to_device
from longdraft.drafters.shared.draft_block import ALL, OutputRows, SelfAttend
from longdraft.memory.store import KVStore
from longdraft.native.boundary import CPU_INT64
from longdraft.views.draft_cache import DraftCache


@dataclass(frozen=True)
class DraftBatch:
    """W tokens for each of B sequences: new tokens of the context, or the nodes of one tree level.

    Attributes:
        slots: KV cache slot of each sequence.
        query_len: number W of tokens of each sequence. Keys and values are computed for all of them.
        num_outputs: number T of output tokens of each sequence, which are its last tokens.
        kv_ranges: [start, end) of the cache entries that each sequence attends to. The last W belong to the W tokens.
        mask: (B, T, S) bool: which of the last S entries of the range each output token attends to; None: all.
        num_mask_tokens: how many of a sequence's last tokens are P-EAGLE's mask tokens, which stand for unknown tokens.
    """

    slots: tuple[int, ...]
    query_len: int
    num_outputs: int
    kv_ranges: tuple[tuple[int, int], ...]
    mask: torch.Tensor | None = None
    num_mask_tokens: int = 0

    @classmethod
    def from_new_tokens(
        cls, cache: DraftCache, slots: Sequence[int], query_len: int, num_mask_tokens: int = 0
    ) -> DraftBatch:
        """Makes the batch of each sequence's last ``query_len`` committed tokens, and of mask tokens after these. The
        output tokens are the root, which is the last committed token, and the mask tokens."""
        ends = [cache.store.lengths[slot] + num_mask_tokens for slot in slots]
        kv_ranges = tuple((cache.window_start(slot), end) for slot, end in zip(slots, ends, strict=True))
        num_outputs = 1 + num_mask_tokens
        causal = torch.ones(num_outputs, num_outputs, dtype=torch.bool, device="cpu").tril()
        mask = causal.expand(len(slots), -1, -1) if num_mask_tokens else None
        return cls(tuple(slots), query_len + num_mask_tokens, num_outputs, kv_ranges, mask, num_mask_tokens)

    @classmethod
    def from_level(cls, cache: DraftCache, slots: Sequence[int], depth: int, mask: torch.Tensor) -> DraftBatch:
        """Makes the batch of a level's W nodes. ``mask``: (B, W, S): which of the tree's S nodes a node attends to."""
        _, width, num_nodes = mask.shape
        kv_ranges = tuple((cache.window_start(slot, depth), cache.store.lengths[slot] + num_nodes) for slot in slots)
        return cls(tuple(slots), width, width, kv_ranges, mask)

    @property
    def max_kv_len(self) -> int:
        """Largest number of cache entries that a sequence attends to."""
        return max(end - start for start, end in self.kv_ranges)

    def output_rows(self, device: torch.device | str) -> OutputRows:
        """Returns the indices of the output tokens among all B * W tokens."""
        if self.num_outputs == self.query_len:
            return ALL
        if len(self.slots) == 1:
            return slice(self.query_len - self.num_outputs, None)
        indices = torch.arange(len(self.slots) * self.query_len, device=device).view(-1, self.query_len)
        return indices[:, self.query_len - self.num_outputs :].flatten()

    def attend_fns(self, cache: DraftCache) -> list[SelfAttend]:
        """Returns each layer's self-attention, a function that also writes keys and values to the cache. In a draft of
        several layers all tokens are queries, because the next layer computes keys from the outputs of all tokens."""
        num_layers = cache.store.shape.layers
        if num_layers == 1 and supports_batched_attend(cache):
            return [batched_attend(cache.store, DeviceBatch.make(cache, self), self.max_kv_len)]
        visible_to = self._visible_to_outputs if num_layers == 1 else self._visible_to_all
        visible = [visible_to(cache, i) for i in range(len(self.slots))]
        return [self._attend_by_sequence(*cache.store.layer(layer), visible) for layer in range(num_layers)]

    def _attend_by_sequence(self, keys: torch.Tensor, values: torch.Tensor, visible: list[_VisibleKV]) -> SelfAttend:
        """Returns one layer's self-attention, sequence by sequence. ``keys``, ``values``: the layer's cache."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outputs = []
            per_sequence = (x.split(x.shape[1] // len(self.slots), 1) for x in (q, k, v))
            for slot, (start, end, mask), queries, new_k, new_v in zip(self.slots, visible, *per_sequence, strict=True):
                new_entries = slice(end - self.query_len, end)
                keys[slot, :, new_entries], values[slot, :, new_entries] = new_k, new_v
                outputs.append(attend_sequence(queries, keys[slot, :, start:end], values[slot, :, start:end], mask))
            return torch.cat(outputs, dim=1)

        return attend

    def _visible_to_outputs(self, cache: DraftCache, i: int) -> _VisibleKV:
        """Returns the entries that the output tokens of sequence i attend to."""
        (start, end), mask = self.kv_ranges[i], self.mask
        if mask is None:
            return start, end, None
        full_mask = F.pad(mask[i], (end - start - mask.shape[2], 0), value=True)
        return start, end, to_device(full_mask, cache.store.device)

    def _visible_to_all(self, cache: DraftCache, i: int) -> _VisibleKV:
        """Returns the entries that all tokens of sequence i attend to: each token a window that ends with the token."""
        if self.num_outputs == self.query_len and not self.num_mask_tokens and self.mask is not None:  # a tree level
            return self._visible_to_outputs(cache, i)
        end, window = self.kv_ranges[i][1], cache.window or self.kv_ranges[i][1]
        first_query = end - self.query_len
        start = max(0, first_query + 1 - window)
        queries, keys = (torch.arange(first, end, device=cache.store.device) for first in (first_query, start))
        # Mask tokens attend to earlier mask tokens even outside the window.
        in_window = (queries[:, None] - keys < window) | (keys >= end - self.num_mask_tokens)
        return start, end, (keys <= queries[:, None]) & in_window


# (start, end, mask): queries attend to entries [start, end) of a slot; mask: (queries, end - start) bool; None: all.
_VisibleKV = tuple[int, int, torch.Tensor | None]


def supports_batched_attend(cache: DraftCache) -> bool:
    """True if one call (:func:`batched_attend`) can compute the attention of all sequences."""
    shape = cache.store.shape
    return shape.layers == 1 and hybrid.why_unavailable(cache.store.device, shape.dtype, shape.head_dim) is None


class DeviceBatch(NamedTuple):
    """The indices of a :class:`DraftBatch` as tensors on the device.

    Attributes:
        write_indices: (B, W, 2) int64: slot and cache entry of each token's keys and values.
        slots, kv_starts, kv_lens: (B,) int32: all queries attend to kv_lens entries of the slot from kv_starts on.
        mask: (B, T, S) bool: which of the S entries after that range each query attends to; S may be 0.
    """

    write_indices: torch.Tensor
    slots: torch.Tensor
    kv_starts: torch.Tensor
    kv_lens: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def make(
        cls, cache: DraftCache, batch: DraftBatch, padded_query_len: int = 0, padded_batch_size: int = 0
    ) -> DeviceBatch:
        """Makes the tensors, with one copy of all integers to the device.

        Args:
            padded_query_len: W after padding, which also pads S to ``cache.scratch``; 0: no padding.
            padded_batch_size: B after padding; 0: no padding. Padding sequences read the first entry of the first slot.
        """
        # Padding tokens write to the last entry of a slot. No query attends to this entry.
        device, padding_entry = cache.store.device, cache.store.capacity - 1
        slots, query_len, kv_ranges, mask = batch.slots, batch.query_len, batch.kv_ranges, batch.mask
        if mask is None:
            mask = torch.empty(len(slots), 1, 0, dtype=torch.bool, device=device)
        batch_size, width = padded_batch_size or len(slots), padded_query_len or query_len
        num_padding = batch_size - len(slots)
        writes = [
            (slot, end - query_len + i if i < query_len else padding_entry)
            for slot, (_, end) in zip(slots, kv_ranges, strict=True)
            for i in range(width)
        ]
        writes += [(slots[0], padding_entry)] * width * num_padding
        slots_and_ranges = [
            [*slots, *[slots[0]] * num_padding],
            [*(start for start, _ in kv_ranges), *[0] * num_padding],
            [*(end - start - mask.shape[2] for start, end in kv_ranges), *[1] * num_padding],
        ]
        # Each list is padded to a multiple of 16 bytes (4 int32), an alignment on which kernels may rely.
        aligned = [n for values in slots_and_ranges for n in (*values, *[0] * (-batch_size % 4))]
        # The int64 and the int32 numbers are copied together, as 32-bit words.
        write_words = torch.tensor(writes, **CPU_INT64).view(torch.int32).flatten()
        words = to_device(torch.cat([write_words, torch.tensor(aligned, dtype=torch.int32, device="cpu")]), device)
        write_indices = words[: len(write_words)].view(torch.long).view(-1, width, 2)
        slots_t, kv_starts, kv_lens = words[len(write_words) :].view(3, -1)[:, :batch_size].unbind()
        mask = to_device(mask, device)
        if padded_query_len:
            mask = F.pad(mask, (0, cache.scratch - mask.shape[2], 0, 0, 0, num_padding))
        return cls(write_indices, slots_t, kv_starts, kv_lens, mask)


def batched_attend(store: KVStore, device_batch: DeviceBatch, max_kv_len: int) -> SelfAttend:
    """Returns the self-attention of all sequences in one call, for q (query heads, B * T, d), k and v (KV heads, B * W,
    d), to the draft's KV in ``store``. ``max_kv_len``: upper bound on the entries that a sequence attends to, by which
    the kernel splits the work."""
    keys, values = store.layer(0)
    slots, entries = device_batch.write_indices.reshape(-1, 2).unbind(1)
    metadata = hybrid.HybridMetadata.build(
        keys, device_batch.slots, device_batch.kv_lens, max_kv_len, device_batch.mask, device_batch.kv_starts
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for cached, x in ((keys, k), (values, v)):
            cached[slots, :, entries] = x.transpose(0, 1)
        queries = q.unflatten(1, (len(device_batch.slots), -1)).transpose(0, 1)
        out = hybrid.attend_prefix_and_tree(queries, keys, values, metadata, keys.shape[3] ** -0.5)
        return out.transpose(0, 1).flatten(1, 2)

    return attend
