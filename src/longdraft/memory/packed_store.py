"""A KV store in fewer bytes: bfloat16, or int8 with a scale for each row.

Exact methods draft on copies of the KV in such a store. A target whose own KV is in one is a slightly different model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from longdraft.memory import sizes
from longdraft.memory.rooms import Rooms
from longdraft.memory.store import KVShape, KVStore, turned_rows
from longdraft.native.scaled import Scaled


class PackedStore(KVStore):
    """A :class:`KVStore` that rounds keys and values as they are written; on a CPU keys are transposed.

    Args:
        shape: shape and dtype of the rows that are written. Read ``keys`` and ``values`` with ``.to(shape.dtype)``.
        dtype: torch.bfloat16, or torch.int8, which makes keys and values
            :class:`~longdraft.native.scaled.Scaled`.
        rooms: memory to take, as in :class:`KVStore`.

    Raises:
        MemoryBudgetError: they do not fit the free memory.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        feature_layers: tuple[int, ...] = (),
        feature_size: int = 0,
        device: torch.device | str = "cpu",
        rooms: Rooms | None = None,
    ) -> None:
        self._dtype = dtype
        turned = torch.device(device).type == "cpu"
        super().__init__(shape, slots, capacity, device, turned, feature_layers, feature_size, rooms)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def _allocate(self, transposed_keys: bool, beside: int) -> tuple[torch.Tensor, torch.Tensor]:
        size, device = self._size, self.device
        needed = self.bytes_for(replace(self.shape, dtype=self._dtype), self.slots, self.capacity)
        if self._dtype == torch.int8:
            needed += 2 * torch.Size(size[:-1]).numel() * torch.float32.itemsize
        sizes.require(needed + beside, device, self._name)
        values = torch.empty(size, dtype=self._dtype, device=device)
        keys = turned_rows(size, self._dtype, device) if transposed_keys else torch.empty_like(values)
        if self._dtype == torch.int8:
            # Scaled behaves like a tensor wherever rows are read and written.
            scaled = (Scaled(x, torch.empty(size[:-1], device=device, dtype=torch.float32)) for x in (keys, values))
            keys, values = (cast(torch.Tensor, x) for x in scaled)
        return self._zeroed(keys), self._zeroed(values)
