"""A store in fewer bytes: bfloat16, or int8 with a scale for each row. Exact methods draft on copies in one; a target
whose own KV is in one is another model, if only by a little."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from longdraft.memory import sizes
from longdraft.memory.store import KVShape, KVStore, turned_rows
from longdraft.native.scaled import Scaled


class PackedStore(KVStore):
    """Keys and values on a CPU that are rounded as they are written. Features are kept as they are.

    Args:
        shape: of the rows that are written.
        dtype: what they are rounded to: torch.bfloat16 or torch.int8, whose ``keys`` and ``values`` are
            :class:`~longdraft.native.scaled.Scaled`. They are read with ``.to(shape.dtype)``.
        others: as of :class:`KVStore`; keys are transposed.

    Raises:
        MemoryBudgetError: when they do not fit the memory that is free.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        feature_layers: tuple[int, ...] = (),
        feature_size: int = 0,
    ) -> None:
        self._dtype = dtype
        super().__init__(shape, slots, capacity, "cpu", True, feature_layers, feature_size)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def _allocate(self, transposed_keys: bool, beside: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (self.shape.layers, self.slots, self.shape.kv_heads, self.capacity, self.shape.head_dim)
        needed = self.bytes_for(replace(self.shape, dtype=self._dtype), self.slots, self.capacity)
        if self._dtype == torch.int8:
            needed += 2 * torch.Size(size[:-1]).numel() * torch.float32.itemsize
        sizes.require(needed + beside, self.device, f"A cache of {self.capacity} tokens")
        keys, values = turned_rows(size, self._dtype, self.device), torch.empty(size, dtype=self._dtype)
        if self._dtype != torch.int8:
            return keys, values
        # They stand for tensors wherever rows are read and written.
        return cast(tuple[torch.Tensor, torch.Tensor], tuple(Scaled(x, torch.empty(size[:-1])) for x in (keys, values)))
