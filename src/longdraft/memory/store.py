"""The KV store: preallocated keys and values, a slot per sequence, each slot with its own length.

Rows ``[0, length)`` of a slot are committed. A forward writes its block behind them, in scratch space, and
:meth:`KVStore.commit` keeps the accepted path of it and moves it into place. A store may also keep the hidden states
of some layers (features), one row a token, for drafters of the EAGLE kind. It may keep keys and values in fewer bytes
than the model's: exact methods draft on copies in such a store, and a target whose own KV is in one is a slightly
different model.
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

# What layers without rows for the whole text keep of each sequence.
LayerStates = RecurrentStates | WindowKVCache
# Bytes of a cache line.
_LINE = 64


@dataclass(frozen=True)
class KVShape:
    """The sizes and the dtype of a model's cache, apart from its length.

    Attributes:
        padded: some layers have fewer heads or smaller ones, and leave the rest of their rows zero.
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
    """Rows of some tokens outside of a store.

    Attributes:
        keys, values: (layers, kv_heads, n, head_dim), keys after RoPE.
        features: (n, layers kept x feature_size); None if none are kept.
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
        slots: how many sequences fit.
        capacity: rows a slot: the longest context plus the largest block.
        device: where the tensors live.
        feature_layers: decoder layers whose output hidden states are kept, low to high.
        feature_size: numbers in one hidden state.
        transposed_keys: keep the keys of a head as a (head_dim, capacity) matrix in memory; only the strides differ.
            A CPU multiplies a few query rows with it much faster (docs/benchmarks.md).
        rooms: memory to take, with as many slots and rows or more; None allocates memory of the store's own.
        dtype: what rows are rounded to as they are written; None for the shape's. With torch.int8 keys and values are
            :class:`~longdraft.native.int8_kv.Scaled`. Read them with ``.to(shape.dtype)``.

    Attributes:
        dtype: that keys and values are kept in.
        arena_buffers: the memory that was taken; None for the store's own.
        keys, values: (layers, slots, kv_heads, capacity, head_dim).
        features: (slots, capacity, layers kept x feature_size), the layers side by side; None if none are kept.
        lengths: committed rows of each slot.
        num_unverified: rows behind the committed ones that a partial verification wrote. Only drafters read them, and a
            full forward overwrites them.
        states: of the layers that keep no rows of the whole text.
        compat_key: what distinguishes stores whose rows or states cannot be those of this one.
        is_resident: all layers stay in memory, where kernels and recorded forwards read them.

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
        make = partial(self._made, transposed_keys=transposed_keys, width=width)
        self.arena_buffers: ArenaBuffers | None = None
        if buffer_arena is None:
            tensors = make(slots, capacity)
        else:
            kind = "store", shape, self.dtype, self.device, transposed_keys, feature_layers, width
            self.arena_buffers = buffer_arena.acquire(self, kind, slots, capacity, make)
            self.slots, self.capacity, tensors = (
                self.arena_buffers.slots,
                self.arena_buffers.capacity,
                self.arena_buffers.tensors,
            )
        self.keys, self.values = tensors[:2]
        self.features: torch.Tensor | None = tensors[2] if feature_layers else None
        self.lengths = [0] * self.slots
        self.num_unverified = [0] * self.slots
        self.states: tuple[LayerStates, ...] = ()
        self._own_states: tuple[LayerStates, ...] = ()

    def _made(self, slots: int, capacity: int, transposed_keys: bool, width: int) -> tuple[torch.Tensor, ...]:
        """Keys, values, and features of ``width`` numbers if any are kept."""
        self.slots, self.capacity = slots, capacity
        size = slots, capacity, width
        made = self._allocate(transposed_keys, prod(size) * self.shape.dtype.itemsize)
        return (*made, torch.empty(size, dtype=self.shape.dtype, device=self.device)) if width else made

    def _allocate(self, transposed_keys: bool, beside: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, after a check that they and ``beside`` bytes of features fit."""
        size, small = self._size, self.dtype == torch.int8
        needed = self.bytes_for(replace(self.shape, dtype=self.dtype), self.slots, self.capacity) + beside
        needed += 2 * prod(size[:-1]) * torch.float32.itemsize if small else 0
        memory_info.require_bytes(needed, self.device, self._name)
        values = torch.empty(size, dtype=self.dtype, device=self.device)
        keys = empty_transposed(size, self.dtype, self.device) if transposed_keys else torch.empty_like(values)
        if small:  # they behave like tensors wherever rows are read and written
            scaled = (Int8KV(x, torch.empty(size[:-1], device=x.device, dtype=torch.float32)) for x in (keys, values))
            keys, values = (cast(torch.Tensor, x) for x in scaled)
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
        """Gives the store the states of its slots, which are committed and truncated with the rows.

        Raises:
            MemoryBudgetError: they do not fit the free memory.
        """
        needed = self.slots * sum(each.bytes_per_slot for each in states)
        memory_info.require_bytes(needed, self.device, f"The states of {self.slots} sequences")
        self.states = self._own_states = states

    def use_states_of(self, full: KVStore) -> None:
        """Makes forwards on this store, which has some rows of another's texts, use that store's states."""
        self.states, self._own_states = full.states, ()

    def restorable_length(self, slot: int, length: int) -> int:
        """The largest length, ``length`` at most, that :meth:`truncate` can go back to."""
        length, before = min(length, self.lengths[slot]), -1
        while length != before:
            before = length
            for states in self._own_states:
                length = states.restorable_length(slot, length)
        return length

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, (slots, kv_heads, capacity, head_dim), as views."""
        return self.keys[index], self.values[index]

    def slot_kv(self, slot: int, layers: slice, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a slot, to copy rows in and out; :meth:`layer` is for attention.

        Args:
            layers: one of :attr:`layer_groups`.
            start: rows from here on may be changed through the views.

        Returns:
            Views (layers, kv_heads, capacity, head_dim), valid until the next call of any method.
        """
        return self.keys[layers, slot], self.values[layers, slot]

    @property
    def layer_groups(self) -> list[slice]:
        """All layers, in groups that this store can hold in memory at a time."""
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
        """A block behind the committed rows of some slots, for a forward.

        Args:
            tokens: a row of token ids for each slot, or a tensor (B, T) on any device. Chains may differ in length:
                shorter ones are padded, and no row attends to the padding.
            bases: position of each sequence's first row; None takes the slot's length. They differ where a store
                holds a selection of the text's KV (SpecPV, section 3.2).
            depths: (B, T) depths in the tree; a node's position is its base + its depth. None for chains.
            mask: (B, T, offset + T) bool, the tree's ancestor mask. None for chains.
            offset: rows of the same tree that earlier forwards have written behind the prefix; the block goes behind
                them. This feeds a tree level by level.
            prompt: the block is a piece of a prompt. Otherwise text is decoded, and a row's result does not depend on
                the rows beside it.
            text: tokens of the whole prompt that a piece belongs to; 0 in decoding.

        Raises:
            ValueError: the block does not fit a slot.
        """
        size = max(map(len, token_ids))
        self.check_capacity(slots, tree_offset + size)
        lengths = [self.lengths[slot] for slot in slots]
        if depths is None:
            # Padding comes last, so a causal mask hides it; it needs a position all the same.
            chain = range(tree_offset, tree_offset + size)
            depths = [[d if i < len(row) else 0 for i, d in enumerate(chain)] for row in token_ids]
            if not isinstance(token_ids, torch.Tensor):
                token_ids = [[*row, *[row[-1]] * (size - len(row))] for row in token_ids]
        positions = [[n + d for d in row] for n, row in zip(root_positions or lengths, depths, strict=True)]
        for states in self.states:
            states.prepare(slots, root_positions or lengths, tree_offset + size)
        return ForwardBatch.make(
            slots,
            lengths,
            size,
            mask,
            self.device,
            tree_offset,
            is_prefill,
            token_ids,
            positions,
            root_positions,
            prompt_len,
        )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        """Writes a block's rows behind each sequence's prefix, uncommitted.

        Args:
            k, v: (B, kv_heads, T, head_dim), keys after RoPE; or fewer heads, or smaller ones, in a padded shape.
        """
        keys, values = self.layer(layer)
        if self.shape.padded:
            keys, values = keys[:, : k.shape[1], :, : k.shape[3]], values[:, : v.shape[1], :, : v.shape[3]]
        if self.device.type == "cpu" and not batch.is_captured:
            for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
                places = slice(n + batch.tree_offset, n + batch.tree_len)
                keys[slot, :, places] = k[b]
                values[slot, :, places] = v[b]
            return
        # Only device tensors and static shapes: a CUDA graph can record this form.
        first = batch.prefix_lens_t + batch.tree_offset if batch.write_starts_t is None else batch.write_starts_t
        rows = first[:, None] + torch.arange(batch.query_len, device=self.device)
        slots = batch.slots_t[:, None].expand_as(rows)
        keys.transpose(1, 2)[slots.long(), rows.long()] = k.transpose(1, 2)
        values.transpose(1, 2)[slots.long(), rows.long()] = v.transpose(1, 2)

    def write_features(self, hidden: Mapping[int, torch.Tensor], batch: ForwardBatch) -> None:
        """Writes a block's hidden states beside its rows, uncommitted.

        Args:
            hidden: layer -> (B, T, feature_size), for ``feature_layers`` at least.
        """
        if self.features is None:
            return
        rows = torch.cat([hidden[layer] for layer in self.feature_layers], dim=-1)
        for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
            # A prompt's piece may have them for its last row alone, where later layers compute no other.
            end = n + batch.tree_len
            self.features[slot, end - rows.shape[1] : end] = rows[b]

    def read_entries(self, slot: int, start: int, end: int) -> KVEntries:
        """Copies committed rows ``[start, end)`` of a slot to the host's memory."""
        dtype = self.dtype if self.dtype.is_floating_point else self.shape.dtype
        size = (self.shape.layers, self.shape.kv_heads, end - start, self.shape.head_dim)
        keys, values = torch.empty(size, dtype=dtype, device="cpu"), torch.empty(size, dtype=dtype, device="cpu")
        for layers in self.layer_groups:
            for out, own in zip((keys, values), self.slot_kv(slot, layers, end), strict=True):
                out[layers] = own[:, :, start:end].to(dtype)
        features = None if self.features is None else self.features[slot, start:end].to("cpu", copy=True)
        return KVEntries(keys, values, features)

    def write_entries(
        self, slot: int, start: int, keys: torch.Tensor, values: torch.Tensor, features: torch.Tensor | None = None
    ) -> None:
        """Writes rows ``[start, start + n)`` of a slot, uncommitted, in all layers.

        Args:
            keys, values: (layers, kv_heads, n, head_dim), keys after RoPE.
            features: (n, layers kept x feature_size); None leaves the slot's unchanged.

        Raises:
            ValueError: the rows do not fit the slot.
        """
        end = start + keys.shape[2]
        if not 0 <= start <= end <= self.capacity:
            raise ValueError(f"rows [{start}, {end}) do not lie in a slot of {self.capacity} rows")
        for layers in self.layer_groups:
            own_keys, own_values = self.slot_kv(slot, layers, start)
            own_keys[:, :, start:end] = keys[layers]
            own_values[:, :, start:end] = values[layers]
        if features is not None and self.features is not None:
            self.features[slot, start:end] = features

    def copy_entries(
        self, source_slot: int, slot: int, start: int, end: int, source_store: KVStore | None = None
    ) -> None:
        """Copies committed rows ``[start, end)`` of a slot to the same place in ``slot``, and commits.

        Args:
            source: the slot, of the store ``source_store``; None is this one. If the store has states, they must be
                :meth:`restorable_length` there for ``end`` rows.
        """
        source_store = source_store or self
        for layers in max(self.layer_groups, source_store.layer_groups, key=len):  # all layers at once, or one by one
            for own, rows in zip(
                self.slot_kv(slot, layers, start), source_store.slot_kv(source_slot, layers, end), strict=True
            ):
                own[:, :, start:end] = rows[:, :, start:end]
        if self.features is not None and source_store.features is not None:
            self.features[slot, start:end] = source_store.features[source_slot, start:end].clone()
        for states, others in zip(self._own_states, source_store._own_states, strict=True):
            states.copy_from(others, source_slot, slot, end)  # type: ignore[arg-type]  # of the same kind
        self.lengths[slot] = end

    def readable_len(self, slot: int) -> int:
        """Number of rows that a drafter may read: committed and unverified ones."""
        return self.lengths[slot] + self.num_unverified[slot]

    def check_capacity(self, slots: Sequence[int], num_tokens: int) -> None:
        """Raises ValueError if a block of ``num_tokens`` rows does not fit behind a slot's prefix."""
        for slot in slots:
            if self.lengths[slot] + num_tokens > self.capacity:
                raise ValueError(
                    f"slot {slot} holds {self.lengths[slot]} rows; {num_tokens} more exceed the capacity {self.capacity}"
                )

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keeps the rows of the accepted path, in path order, and drops the other rows behind the prefix.

        Args:
            path: indices of rows behind the prefix, strictly increasing, as in a root-to-node path.

        Raises:
            ValueError: the path is not increasing, or leaves the slot.
        """
        n = self.lengths[slot]
        if any(b <= a for a, b in itertools.pairwise(path)) or (path and path[0] < 0):
            raise ValueError(f"a path is strictly increasing and not negative, got {list(path)}")
        if path and n + path[-1] >= self.capacity:
            raise ValueError(f"path row {path[-1]} lies beyond the capacity {self.capacity}")
        # The part of the path that is already in place (all of a chain) need not move.
        still = next((i for i, row in enumerate(path) if row != i), len(path))
        if still < len(path):
            source = to_device([n + row for row in path[still:]], self.device)
            for layers in self.layer_groups:
                for rows in self.slot_kv(slot, layers, n + still):
                    rows[:, :, n + still : n + len(path)] = rows.index_select(2, source.to(rows.device))
            if self.features is not None:
                self.features[slot, n + still : n + len(path)] = self.features[slot].index_select(0, source)
        for states in self._own_states:
            states.commit(slot, n, path)
        self.lengths[slot] = n + len(path)
        self.num_unverified[slot] = 0

    def truncate(self, slot: int, length: int) -> None:
        """Drops all rows of a slot after the first ``length``.

        Raises:
            ValueError: the slot is shorter, or has states that cannot go back there: see :meth:`restorable_length`.
        """
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot truncate slot {slot} of length {self.lengths[slot]} to {length}")
        for states in self._own_states:
            states.truncate(slot, length)
        self.lengths[slot] = length
        self.num_unverified[slot] = 0


def empty_transposed(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor (..., rows, d) that is stored as (..., d, rows)."""
    *outer, rows, dim = size
    # Each stored row begins on a cache line: a vector that straddles two lines is read twice.
    unit = _LINE // dtype.itemsize
    turned = torch.empty((*outer, dim, -(-rows // unit) * unit), dtype=dtype, device=device)
    return turned[..., :rows].transpose(-1, -2)
