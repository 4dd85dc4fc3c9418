"""The KV store: preallocated keys and values, a slot per sequence, each slot with its own length.

Entries ``[0, length)`` of a slot are committed. A forward writes its tokens behind them, in scratch space, and
:meth:`KVStore.commit` moves the accepted path into place. A store may also hold the hidden states of some layers
(features) for EAGLE-like drafters. The dtype of keys and values may be smaller than the model's. A draft cache of a
smaller dtype keeps output exact; rounding the target's own KV makes the target a slightly different model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import ClassVar, cast

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.transfer import to_device
from longdraft.memory import memory_info
from longdraft.memory.buffer_arena import ArenaBuffers, BufferArena
from longdraft.memory.recurrent import RecurrentStates
from longdraft.memory.windows import WindowKVCache
from longdraft.native.int8_kv import Int8KV

# Per-slot state of the layers that do not keep KV of the full context.
LayerStates = RecurrentStates | WindowKVCache
_CACHE_LINE = 64  # bytes


@dataclass(frozen=True)
class KVShape:
    """The sizes and the dtype of a model's KV cache, without its length.

    Attributes:
        padded: True if some layers have fewer or smaller heads; the rest of their entries is zero.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    padded: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class KVEntries:
    """Keys, values and features of n tokens outside of a store.

    Attributes:
        keys, values: (layers, kv_heads, n, head_dim), keys after RoPE.
        features: (n, feature layers x feature_size); None without features.
    """

    keys: torch.Tensor
    values: torch.Tensor
    features: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values, self.features) if x is not None)


class KVStore:
    """Keys and values of all layers.

    Args:
        shape: layers, KV heads, head size, dtype.
        slots: number of sequences.
        capacity: entries of a slot: the longest context plus the most tokens of one forward.
        feature_layers: decoder layers whose output hidden states are stored, low to high.
        feature_size: numbers in one hidden state.
        transposed_keys: lay out the keys of a head as a (head_dim, capacity) matrix; only the strides differ. A CPU
            multiplies it with a few queries much faster (docs/benchmarks.md).
        buffer_arena: lends the memory, which may hold more slots and entries; None: the store allocates its memory.
        dtype: dtype to which keys and values are rounded when they are written; None: that of ``shape``. With
            torch.int8 they are :class:`~longdraft.native.int8_kv.Int8KV`. Read them with ``.to(shape.dtype)``.

    Attributes:
        arena_buffers: the memory acquired from the arena; None if the store allocated it.
        keys, values: (layers, slots, kv_heads, capacity, head_dim).
        features: (slots, capacity, feature layers x feature_size), the layers side by side; None without features.
        lengths: number of committed entries of each slot.
        num_unverified: number of entries behind the committed ones that a partial verification wrote. Only drafters
            read these entries, and the next full forward overwrites them.
        states: states of the layers without KV of the full context, for forwards on this store.
        compat_key: stores with different keys cannot exchange entries or states.
        is_resident: True if all layers stay on one device, where kernels and CUDA graphs read them.

    Raises:
        MemoryBudgetError: the tensors do not fit the free memory.
    """

    is_resident: ClassVar[bool] = True

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        capacity: int,
        device: torch.device | str = "cpu",
        transposed_keys: bool = False,
        feature_layers: tuple[int, ...] = (),
        feature_size: int = 0,
        buffer_arena: BufferArena | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.shape, self.dtype = shape, dtype or shape.dtype
        self.compat_key: object = None
        self.slots = slots
        self.capacity = capacity
        self.device = torch.device(device)
        self.feature_layers = feature_layers
        width = len(feature_layers) * feature_size
        allocate = partial(self._make_tensors, transposed_keys=transposed_keys, width=width)
        self.arena_buffers: ArenaBuffers | None = None
        if buffer_arena is None:
            tensors = allocate(slots, capacity)
        else:
            key = "store", shape, self.dtype, self.device, transposed_keys, feature_layers, width
            self.arena_buffers = buffers = buffer_arena.acquire(self, key, slots, capacity, allocate)
            self.slots, self.capacity, tensors = buffers.slots, buffers.capacity, buffers.tensors
        self.keys, self.values = tensors[:2]
        self.features: torch.Tensor | None = tensors[2] if feature_layers else None
        self.lengths = [0] * self.slots
        self.num_unverified = [0] * self.slots
        self.states: tuple[LayerStates, ...] = ()
        self._own_states: tuple[LayerStates, ...] = ()  # the states that are committed and truncated with this store

    def _make_tensors(self, slots: int, capacity: int, transposed_keys: bool, width: int) -> tuple[torch.Tensor, ...]:
        """Allocates keys and values, and features of ``width`` numbers a token if that is not 0. An arena may call this
        with a larger capacity than the constructor's."""
        self.slots, self.capacity = slots, capacity
        size = slots, capacity, width
        kv = self._allocate(transposed_keys, prod(size) * self.shape.dtype.itemsize)
        return (*kv, torch.empty(size, dtype=self.shape.dtype, device=self.device)) if width else kv

    def _allocate(self, transposed_keys: bool, feature_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocates keys and values, after a check that they fit together with ``feature_bytes`` of features."""
        size, is_int8 = self._size, self.dtype == torch.int8
        needed = self.bytes_for(replace(self.shape, dtype=self.dtype), self.slots, self.capacity) + feature_bytes
        needed += 2 * prod(size[:-1]) * torch.float32.itemsize if is_int8 else 0  # a scale for each key and value
        memory_info.require_bytes(needed, self.device, self._name)
        values = torch.empty(size, dtype=self.dtype, device=self.device)
        keys = empty_transposed(size, self.dtype, self.device) if transposed_keys else torch.empty_like(values)
        if is_int8:  # Int8KV behaves like a tensor wherever entries are read and written
            int8_kv = (Int8KV(x, torch.empty(size[:-1], device=x.device, dtype=torch.float32)) for x in (keys, values))
            keys, values = (cast(torch.Tensor, x) for x in int8_kv)
        return (keys.zero_(), values.zero_()) if self.shape.padded else (keys, values)

    @property
    def _size(self) -> tuple[int, int, int, int, int]:
        return self.shape.layers, self.slots, self.shape.kv_heads, self.capacity, self.shape.head_dim

    @property
    def _name(self) -> str:
        return f"A cache of {self.capacity} tokens"

    @staticmethod
    def bytes_for(shape: KVShape, slots: int, capacity: int) -> int:
        """Bytes of keys and values in a store of this size."""
        return shape.bytes_per_token * slots * capacity

    def attach_states(self, *states: LayerStates) -> None:
        """Attaches states, which this store commits and truncates. Raises MemoryBudgetError if they do not fit."""
        needed = self.slots * sum(layer_states.bytes_per_slot for layer_states in states)
        memory_info.require_bytes(needed, self.device, f"The states of {self.slots} sequences")
        self.states = self._own_states = states

    def use_states_of(self, full: KVStore) -> None:
        """Makes forwards on this store use the states of ``full``, of whose entries this store holds a selection."""
        self.states, self._own_states = full.states, ()

    def restorable_length(self, slot: int, length: int) -> int:
        """The largest length up to ``length`` that :meth:`truncate` can restore."""
        length, previous = min(length, self.lengths[slot]), -1
        while length != previous:
            previous = length
            for states in self._own_states:
                length = states.restorable_length(slot, length)
        return length

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, (slots, kv_heads, capacity, head_dim), as views."""
        return self.keys[index], self.values[index]

    def slot_kv(self, slot: int, layers: slice, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a slot, for copies; attention reads :meth:`layer`.

        Args:
            layers: one of :attr:`layer_groups`.
            start: the first entry that the caller may change through the views.

        Returns:
            Views (layers, kv_heads, capacity, head_dim), valid until the next call of any method.
        """
        return self.keys[layers, slot], self.values[layers, slot]

    @property
    def layer_groups(self) -> list[slice]:
        """Slices that together cover all layers; :meth:`slot_kv` takes one of them (offload: of one layer each)."""
        return [slice(None)]

    def make_forward_batch(
        self,
        slots: Sequence[int],
        token_ids: Sequence[Sequence[int]] | torch.Tensor,
        *,
        root_positions: Sequence[int] | None = None,
        depths: Sequence[Sequence[int]] | None = None,
        mask: torch.Tensor | None = None,
        tree_offset: int = 0,
        is_prefill: bool = False,
        prompt_len: int = 0,
    ) -> ForwardBatch:
        """Makes the batch for a forward that appends tokens behind the committed entries of some slots.

        Args:
            token_ids: a list of token ids for each slot, or a tensor (B, T) on any device. Chains may differ in length:
                shorter ones are padded, and no token attends to the padding.
            root_positions: position of each sequence's first new token; None: the slot's length. The two differ if the
                store holds a selection of the context's KV (SpecPV, section 3.2).
            depths: (B, T) depths in the tree; a node's position is its root's position + its depth. None for chains.
            mask: (B, T, tree_offset + T) bool, the tree's ancestor mask. None for chains.
            tree_offset: number of the tree's tokens that earlier forwards wrote behind the prefix, if a tree is
                computed level by level. The new tokens are written behind these.
            is_prefill: True for a prompt chunk; False: a token's output must not depend on the batch's other tokens.
            prompt_len: tokens of the prompt that the chunk belongs to; 0 in decoding.

        Raises:
            ValueError: the tokens do not fit a slot.
        """
        query_len = max(map(len, token_ids))
        self.check_capacity(slots, tree_offset + query_len)
        lengths = [self.lengths[slot] for slot in slots]
        if depths is None:
            # Padding comes last, so the causal mask hides it. It needs a depth all the same.
            chain = range(tree_offset, tree_offset + query_len)
            depths = [[d if i < len(ids) else 0 for i, d in enumerate(chain)] for ids in token_ids]
            if not isinstance(token_ids, torch.Tensor):
                token_ids = [[*ids, *[ids[-1]] * (query_len - len(ids))] for ids in token_ids]
        roots = root_positions or lengths
        positions = [[root + depth for depth in row] for root, row in zip(roots, depths, strict=True)]
        for states in self.states:
            states.prepare(slots, roots, tree_offset + query_len)
        device = self.device
        return ForwardBatch.make(
            slots, lengths, query_len, mask, device, tree_offset, is_prefill, token_ids, positions, roots, prompt_len
        )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        """Writes a batch's keys and values of a layer behind each sequence's prefix, uncommitted.

        Args:
            k, v: (B, kv_heads, T, head_dim), keys after RoPE. In a padded shape heads may be fewer or smaller.
        """
        keys, values = self.layer(layer)
        if self.shape.padded:
            keys, values = keys[:, : k.shape[1], :, : k.shape[3]], values[:, : v.shape[1], :, : v.shape[3]]
        if self.device.type == "cpu" and not batch.is_captured:
            for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
                new = slice(n + batch.tree_offset, n + batch.tree_len)
                keys[slot, :, new] = k[b]
                values[slot, :, new] = v[b]
            return
        # Only device tensors and static shapes, so that a CUDA graph can capture it.
        starts = batch.prefix_lens_t + batch.tree_offset if batch.write_starts_t is None else batch.write_starts_t
        indices = starts[:, None] + torch.arange(batch.query_len, device=self.device)
        slots = batch.slots_t[:, None].expand_as(indices)
        keys.transpose(1, 2)[slots.long(), indices.long()] = k.transpose(1, 2)
        values.transpose(1, 2)[slots.long(), indices.long()] = v.transpose(1, 2)

    def write_features(self, hidden: Mapping[int, torch.Tensor], batch: ForwardBatch) -> None:
        """Writes a batch's hidden states as features, uncommitted.

        Args:
            hidden: layer -> (B, T, feature_size), with all of ``feature_layers``.
        """
        if self.features is None:
            return
        features = torch.cat([hidden[layer] for layer in self.feature_layers], dim=-1)
        for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
            # The last layers may compute only the last token of a prompt chunk.
            end = n + batch.tree_len
            self.features[slot, end - features.shape[1] : end] = features[b]

    def read_entries(self, slot: int, start: int, end: int) -> KVEntries:
        """Copies committed entries ``[start, end)`` of a slot to host memory."""
        dtype = self.dtype if self.dtype.is_floating_point else self.shape.dtype
        size = (self.shape.layers, self.shape.kv_heads, end - start, self.shape.head_dim)
        keys, values = torch.empty(size, dtype=dtype, device="cpu"), torch.empty(size, dtype=dtype, device="cpu")
        for layers in self.layer_groups:
            for out, stored in zip((keys, values), self.slot_kv(slot, layers, end), strict=True):
                out[layers] = stored[:, :, start:end].to(dtype)
        features = None if self.features is None else self.features[slot, start:end].to("cpu", copy=True)
        return KVEntries(keys, values, features)

    def write_entries(
        self, slot: int, start: int, keys: torch.Tensor, values: torch.Tensor, features: torch.Tensor | None = None
    ) -> None:
        """Writes entries ``[start, start + n)`` of a slot in all layers, uncommitted.

        Args:
            keys, values: (layers, kv_heads, n, head_dim), keys after RoPE.
            features: (n, feature layers x feature_size); None leaves the slot's features unchanged.

        Raises:
            ValueError: the entries do not fit the slot.
        """
        end = start + keys.shape[2]
        if not 0 <= start <= end <= self.capacity:
            raise ValueError(f"entries [{start}, {end}) do not fit a slot of capacity {self.capacity}")
        for layers in self.layer_groups:
            for stored, new in zip(self.slot_kv(slot, layers, start), (keys, values), strict=True):
                stored[:, :, start:end] = new[layers]
        if features is not None and self.features is not None:
            self.features[slot, start:end] = features

    def copy_entries(self, source_slot: int, slot: int, start: int, end: int, other: KVStore | None = None) -> None:
        """Copies committed entries ``[start, end)`` of another slot to the same positions of ``slot``, and commits.

        Args:
            other: the store of ``source_slot``, whose states must be restorable at length ``end``; None: this store.
        """
        source = other or self
        for layers in max(self.layer_groups, source.layer_groups, key=len):  # the smaller groups of the two stores
            kv = zip(self.slot_kv(slot, layers, start), source.slot_kv(source_slot, layers, end), strict=True)
            for target, entries in kv:
                target[:, :, start:end] = entries[:, :, start:end]
        if self.features is not None and source.features is not None:
            self.features[slot, start:end] = source.features[source_slot, start:end].clone()
        for states, others in zip(self._own_states, source._own_states, strict=True):
            states.copy_from(others, source_slot, slot, end)  # type: ignore[arg-type]  # of the same type
        self.lengths[slot] = end

    def readable_len(self, slot: int) -> int:
        """Number of entries that a drafter may read: committed and unverified ones."""
        return self.lengths[slot] + self.num_unverified[slot]

    def check_capacity(self, slots: Sequence[int], num_tokens: int) -> None:
        """Raises ValueError if ``num_tokens`` tokens do not fit behind the prefix of each slot."""
        for slot in slots:
            if (n := self.lengths[slot]) + num_tokens > self.capacity:
                raise ValueError(f"slot {slot} holds {n} tokens; {num_tokens} more exceed the capacity {self.capacity}")

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Commits the entries of the accepted path, in path order, and drops all other entries behind the prefix.

        Args:
            path: indices of entries behind the prefix, strictly increasing, as in a root-to-node path.

        Raises:
            ValueError: the path is not increasing, or leaves the slot.
        """
        n = self.lengths[slot]
        if any(b <= a for a, b in itertools.pairwise(path)) or (path and path[0] < 0):
            raise ValueError(f"a path is strictly increasing and not negative, got {list(path)}")
        if path and n + path[-1] >= self.capacity:
            raise ValueError(f"path index {path[-1]} lies beyond the capacity {self.capacity}")
        # The part of the path that is already in place (all of a chain) need not move.
        in_place = next((i for i, index in enumerate(path) if index != i), len(path))
        if in_place < len(path):
            source = to_device([n + index for index in path[in_place:]], self.device)
            target = slice(n + in_place, n + len(path))
            for layers in self.layer_groups:
                for kv in self.slot_kv(slot, layers, n + in_place):
                    kv[:, :, target] = kv.index_select(2, source.to(kv.device))
            if self.features is not None:
                self.features[slot, target] = self.features[slot].index_select(0, source)
        for states in self._own_states:
            states.commit(slot, n, path)
        self.lengths[slot] = n + len(path)
        self.num_unverified[slot] = 0

    def truncate(self, slot: int, length: int) -> None:
        """Drops all entries of a slot after the first ``length``.

        Raises:
            ValueError: the slot is shorter, or its states cannot be restored there; see :meth:`restorable_length`.
        """
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot truncate slot {slot} of length {self.lengths[slot]} to {length}")
        for states in self._own_states:
            states.truncate(slot, length)
        self.lengths[slot] = length
        self.num_unverified[slot] = 0


def empty_transposed(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor (..., rows, d) whose memory is laid out as (..., d, rows)."""
    *outer, rows, dim = size
    # Each row in memory begins on a cache line, because a vector load across two lines costs two accesses.
    per_line = _CACHE_LINE // dtype.itemsize
    transposed = torch.empty((*outer, dim, -(-rows // per_line) * per_line), dtype=dtype, device=device)
    return transposed[..., :rows].transpose(-1, -2)
