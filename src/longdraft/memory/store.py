"""The KV store: preallocated keys and values, with a slot for each sequence.

Entries ``[0, length)`` of a slot are committed. A forward writes scratch entries behind the committed entries, and
:meth:`KVStore.commit` moves the accepted path into place. A store may also have features, the hidden states of some
layers, for EAGLE-like drafters. Keys and values may be rounded to a smaller dtype than the model's: rounding a draft's
KV keeps the output exact, rounding the target's KV changes the target slightly.

Shapes: B sequences in a batch, T new tokens of each sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.memory import memory_info
from longdraft.memory.buffer_arena import ArenaBuffers, BufferArena
from longdraft.memory.kv_entries import KVEntries
from longdraft.memory.kv_tensors import as_tensor, empty_kv
from longdraft.memory.path_move import move_path, move_paths
from longdraft.memory.recurrent import RecurrentStates
from longdraft.memory.windows import WindowKVCache
from longdraft.native.quantized_kv import entry_bytes

# The state, for each slot, of layers that do not keep KV of the full context.
LayerStates = RecurrentStates | WindowKVCache


@dataclass(frozen=True)
class KVShape:
    """The shape and the dtype of the keys and values of one token.

    Attributes:
        layers: number of layers.
        kv_heads: maximum number of KV heads of a layer.
        head_dim: maximum head size of a layer.
        dtype: the model's dtype of keys and values.
        padded: True if some layers have fewer or smaller heads. The entries of these layers are padded with zeros.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    padded: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.layers * self.kv_heads * entry_bytes(self.dtype, self.head_dim)


@dataclass(frozen=True)
class StoreConfig:
    """The layout and the dtype of a KV store, and what it keeps besides the model's keys and values.

    Attributes:
        transposed_keys: True stores the keys of a head as a (head_dim, capacity) matrix; only the strides differ. A CPU
            multiplies this matrix with a few queries much faster (docs/benchmarks.md).
        feature_layers: decoder layers whose output hidden states are stored, ascending.
        feature_size: size of a hidden state.
        dtype: dtype to which keys and values are rounded; None: the dtype of the store's shape. torch.int8 and
            torch.int4 make them :class:`~longdraft.native.quantized_kv.QuantizedKV`. Read entries with
            ``.to(shape.dtype)``.
    """

    transposed_keys: bool = False
    feature_layers: tuple[int, ...] = ()
    feature_size: int = 0
    dtype: torch.dtype | None = None

    @property
    def feature_width(self) -> int:
        """Number of feature numbers of a token."""
        return len(self.feature_layers) * self.feature_size


class KVStore:
    """Keys and values of all layers.

    Args:
        shape: shape and dtype of the keys and values of a token.
        slots: number of slots: the maximum number of sequences.
        capacity: number of entries of a slot: the longest context and the most scratch entries of a round.
        device: the device of keys, values and features.
        config: layout, dtype and features; None: the defaults of :class:`StoreConfig`.
        buffer_arena: lends buffers, which may have more slots and entries; None: the store allocates its buffers.

    Attributes:
        dtype: dtype of the stored keys and values.
        arena_buffers: the buffers from ``buffer_arena``; None without an arena.
        keys: (layers, slots, kv_heads, capacity, head_dim).
        values: of the same shape as ``keys``.
        features: (slots, capacity, feature layers x feature_size), all layers concatenated; None without features.
        lengths: number of committed entries of each slot.
        num_unverified: for each slot, the number of entries behind the committed entries that a partial verification
            wrote. Only drafters read these entries, and the next full forward overwrites them.
        states: states of the layers without KV of the full context, for forwards on this store.
        compat_key: identifies the stores that can exchange entries and states with this store.
        is_resident: True if all layers stay on one device, where kernels and CUDA graphs read keys and values.

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
        config: StoreConfig | None = None,
        buffer_arena: BufferArena | None = None,
    ) -> None:
        self._config = config = config or StoreConfig()
        self.shape, self.dtype = shape, config.dtype or shape.dtype
        self.compat_key: object = None
        self.slots, self.capacity, self.device = slots, capacity, torch.device(device)
        self.feature_layers = config.feature_layers
        self.arena_buffers: ArenaBuffers | None = None
        if buffer_arena is None:
            tensors = self._make_tensors(slots, capacity)
        else:
            key = "store", shape, self.device, replace(config, dtype=self.dtype)
            self.arena_buffers = buffers = buffer_arena.acquire(self, key, slots, capacity, self._make_tensors)
            self.slots, self.capacity, tensors = buffers.slots, buffers.capacity, buffers.tensors
        self.keys, self.values = tensors[:2]
        self.features: torch.Tensor | None = tensors[2] if config.feature_layers else None
        self.lengths = [0] * self.slots
        self.num_unverified = [0] * self.slots
        self.states: tuple[LayerStates, ...] = ()
        self._own_states: tuple[LayerStates, ...] = ()  # the states that are committed and truncated with this store

    def _make_tensors(self, slots: int, capacity: int) -> tuple[torch.Tensor, ...]:
        """Allocates (keys, values), or (keys, values, features) if a token has features."""
        self.slots, self.capacity = slots, capacity  # an arena rounds the capacity up
        feature_shape = slots, capacity, self._config.feature_width
        kv = self._allocate(prod(feature_shape) * self.shape.dtype.itemsize)
        if not self._config.feature_width:
            return kv
        return (*kv, torch.empty(feature_shape, dtype=self.shape.dtype, device=self.device))

    def _allocate(self, feature_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocates keys and values, after a check that keys, values and features fit the free memory."""
        size = self._kv_size
        needed = self.bytes_per_token * self.slots * self.capacity + feature_bytes
        memory_info.require_bytes(needed, self.device, self._description)
        keys = empty_kv(size, self.dtype, self.device, is_keys=True, transposed=self._config.transposed_keys)
        values = empty_kv(size, self.dtype, self.device, is_keys=False)
        return (keys.zero_(), values.zero_()) if self.shape.padded else (keys, values)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, as they are stored."""
        return replace(self.shape, dtype=self.dtype).bytes_per_token

    @property
    def _kv_size(self) -> tuple[int, int, int, int, int]:
        return self.shape.layers, self.slots, self.shape.kv_heads, self.capacity, self.shape.head_dim

    @property
    def _description(self) -> str:
        return f"A cache of {self.capacity} tokens"

    def attach_states(self, *states: LayerStates) -> None:
        """Attaches states, which this store commits and truncates. Raises MemoryBudgetError if they do not fit."""
        needed = self.slots * sum(layer_states.bytes_per_slot for layer_states in states)
        memory_info.require_bytes(needed, self.device, f"The states of {self.slots} sequences")
        self.states = self._own_states = states

    def use_states_of(self, full: KVStore) -> None:
        """Makes forwards on this store, which has copies of some entries of ``full``, use the states of ``full``."""
        self.states, self._own_states = full.states, ()

    def restorable_length(self, slot: int, length: int) -> int:
        """Returns the largest length up to ``length`` that :meth:`truncate` can restore."""
        length, previous = min(length, self.lengths[slot]), -1
        while length != previous:  # until all states can restore the length
            previous = length
            for states in self._own_states:
                length = states.restorable_length(slot, length)
        return length

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the keys and values of one layer, (slots, kv_heads, capacity, head_dim)."""
        return self.keys[index], self.values[index]

    def slot_kv(self, slot: int, layers: slice, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of a slot's keys and values, (layers, kv_heads, capacity, head_dim), for copies.
        The views are valid until the next call of any method. ``layers`` is one of :attr:`layer_groups`. The caller may
        change only entries from ``start`` on. Attention reads :meth:`layer`."""
        return self.keys[layers, slot], self.values[layers, slot]

    def for_graph(self) -> KVStore:
        """Returns a view for a CUDA graph, which outlives this store: with the same tensors, but without a reference to
        the owner of its buffers, which would otherwise never be freed."""
        view = copy(self)
        view.arena_buffers = None
        return view

    @property
    def layer_groups(self) -> list[slice]:
        """The slices of layers that :meth:`slot_kv` accepts, which together are all layers."""
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
            slots: the slot of each sequence of the batch.
            token_ids: a list of token ids for each slot, or a tensor (B, T) on any device. Lists may differ in length
                if they are chains: shorter lists are padded, and no token attends to the padding.
            root_positions: position of each sequence's first new token; None: the slot's length. The position is larger
                if the store has only a selection of the context's KV (SpecPV, section 3.2).
            depths: (B, T) depths in the tree. The position of a node is the root's position + depth. None for chains.
            mask: (B, T, tree_offset + T) bool, the ancestor mask of the tree. None for chains.
            tree_offset: number of tree tokens that earlier forwards wrote behind the committed entries, if a tree is
                computed level by level. The new tokens are written behind the tokens of earlier levels.
            is_prefill: True for a prompt chunk; False: the other tokens must not change the bits of a token's output.
            prompt_len: number of tokens of the whole prompt in prefill; 0 in decoding.

        Raises:
            ValueError: the tokens do not fit a slot.
        """
        query_len = max(map(len, token_ids))
        self.check_capacity(slots, tree_offset + query_len)
        lengths = [self.lengths[slot] for slot in slots]
        if depths is None:
            # Padding comes last, so the causal mask hides the padding, but padding needs a depth too.
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
        """Writes a batch's keys and values of a layer behind the committed entries, without committing them.
        ``k`` and ``v`` are (B, kv_heads, T, head_dim), keys after RoPE. In a padded shape a layer may have fewer or
        smaller heads."""
        keys, values = self.layer(layer)
        if self.shape.padded:
            keys, values = keys[:, : k.shape[1], :, : k.shape[3]], values[:, : v.shape[1], :, : v.shape[3]]
        if self.device.type == "cpu" and not batch.is_captured:
            for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
                new = slice(n + batch.tree_offset, n + batch.tree_len)
                keys[slot, :, new] = k[b]
                values[slot, :, new] = v[b]
            return
        # Only device tensors and static shapes, so that a CUDA graph can capture the write.
        starts = batch.prefix_lens_t + batch.tree_offset if batch.write_starts_t is None else batch.write_starts_t
        indices = starts[:, None] + torch.arange(batch.query_len, device=self.device)
        slots = batch.slots_t[:, None].expand_as(indices)
        keys.transpose(1, 2)[slots.long(), indices.long()] = k.transpose(1, 2)
        values.transpose(1, 2)[slots.long(), indices.long()] = v.transpose(1, 2)

    def write_features(self, hidden: Mapping[int, torch.Tensor], batch: ForwardBatch) -> None:
        """Writes a batch's hidden states as features, without committing them. ``hidden`` maps each of
        ``feature_layers`` to (B, T, feature_size)."""
        if self.features is None:
            return
        features = torch.cat([hidden[layer] for layer in self.feature_layers], dim=-1)
        if batch.is_captured:  # the numbers on the host have no meaning
            starts = batch.prefix_lens_t + batch.tree_offset
            entries = starts[:, None] + torch.arange(batch.query_len, device=self.device)
            self.features[batch.slots_t[:, None].long(), entries.long()] = features
            return
        for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
            # The model's last layers may compute only the last tokens of a prompt chunk.
            end = n + batch.tree_len
            self.features[slot, end - features.shape[1] : end] = features[b]

    def read_entries(self, slot: int, start: int, end: int) -> KVEntries:
        """Copies committed entries ``[start, end)`` of a slot to host memory."""
        copies = list[torch.Tensor]()
        for layers in self.layer_groups:
            kv = [as_tensor(x[:, :, start:end]) for x in self.slot_kv(slot, layers, end)]
            size = self.shape.layers, self.shape.kv_heads, end - start
            copies = copies or [torch.empty((*size, x.shape[-1]), dtype=x.dtype, device="cpu") for x in kv]
            for out, x in zip(copies, kv, strict=True):
                out[layers] = x
        keys, values = copies
        features = None if self.features is None else self.features[slot, start:end].to("cpu", copy=True)
        return KVEntries(keys, values, features)

    def write_entries(
        self, slot: int, start: int, keys: torch.Tensor, values: torch.Tensor, features: torch.Tensor | None = None
    ) -> None:
        """Writes entries ``[start, start + n)`` of a slot in all layers, without committing them.

        ``keys`` and ``values`` are (layers, kv_heads, n, head_dim), keys after RoPE, or what :meth:`read_entries`
        returned. ``features`` are (n, feature layers x feature_size); None leaves the slot's features unchanged.

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
        """Copies committed entries ``[start, end)`` of ``source_slot`` in ``other`` (None: this store) to the same
        positions of ``slot``, and commits them. The states of ``other`` must be restorable at length ``end``."""
        source = other or self
        for layers in max(self.layer_groups, source.layer_groups, key=len):  # both stores accept the smaller groups
            kv = zip(self.slot_kv(slot, layers, start), source.slot_kv(source_slot, layers, end), strict=True)
            for target, entries in kv:
                target[:, :, start:end] = entries[:, :, start:end]
        if self.features is not None and source.features is not None:
            self.features[slot, start:end] = source.features[source_slot, start:end].clone()
        for states, source_states in zip(self._own_states, source._own_states, strict=True):
            states.copy_from(source_states, source_slot, slot, end)  # type: ignore[arg-type]  # of the same type
        self.lengths[slot] = end

    def readable_len(self, slot: int) -> int:
        """Returns the number of entries that a drafter may read: committed and unverified entries."""
        return self.lengths[slot] + self.num_unverified[slot]

    def check_capacity(self, slots: Sequence[int], num_tokens: int) -> None:
        """Raises ValueError if ``num_tokens`` tokens do not fit behind the committed entries of each slot."""
        for slot in slots:
            if (n := self.lengths[slot]) + num_tokens > self.capacity:
                raise ValueError(f"slot {slot} holds {n} tokens; {num_tokens} more exceed the capacity {self.capacity}")

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Commits the scratch entries of the accepted path, in path order, and drops all other scratch entries.

        ``path`` has the strictly increasing indices of scratch entries, counted from the slot's length.

        Raises:
            ValueError: the path is not increasing, or leaves the slot.
        """
        n = self.lengths[slot]
        if any(b <= a for a, b in itertools.pairwise(path)) or (path and path[0] < 0):
            raise ValueError(f"a path is strictly increasing and not negative, got {list(path)}")
        if path and n + path[-1] >= self.capacity:
            raise ValueError(f"path index {path[-1]} lies beyond the capacity {self.capacity}")

        def tensors_from(first: int) -> Iterator[torch.Tensor]:
            for layers in self.layer_groups:
                yield from self.slot_kv(slot, layers, first)
            if self.features is not None:
                yield self.features[slot]

        move_path(n, path, tensors_from)
        for states in self._own_states:
            states.commit(slot, n, path)
        self.lengths[slot] = n + len(path)
        self.num_unverified[slot] = 0

    def move_paths(self, slots: torch.Tensor, starts: torch.Tensor, paths: torch.Tensor) -> None:
        """Moves the scratch entries of accepted paths into place, without committing them, in a CUDA graph.
        Arguments: see :func:`~longdraft.memory.path_move.move_paths`."""
        kv = self.keys.transpose(2, 3), self.values.transpose(2, 3)  # slots and entries side by side
        move_paths(kv if self.features is None else (*kv, self.features), slots, starts, paths)

    def truncate(self, slot: int, length: int) -> None:
        """Drops all entries of a slot after the first ``length`` entries.

        Raises:
            ValueError: the slot is shorter, or ``length`` is no :meth:`restorable_length` of the slot's states.
        """
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot truncate slot {slot} of length {self.lengths[slot]} to {length}")
        for states in self._own_states:
            states.truncate(slot, length)
        self.lengths[slot] = length
        self.num_unverified[slot] = 0
