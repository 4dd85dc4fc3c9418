"""Rooms: device memory of stores and windows that is kept from one run to the next.

A recorded forward (:mod:`longdraft.model.gpu.cuda_graphs`) holds for the addresses that it was recorded with. So the memory
that it reads outlives the store that used it: the next store of its kind takes that memory, and finds the recordings.
Capacities are rounded up, so that texts of similar lengths share a room. Rooms are only used on devices where forwards
are recorded; they are freed as soon as something else needs the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from longdraft.errors import MemoryBudgetError
from longdraft.memory import memory_info

# Classes of capacities between a power of two and the next, so that rounding costs an eighth at most.
STEPS_PER_DOUBLING = 8


@dataclass(eq=False)
class ArenaBuffers:
    """Tensors for a number of slots with a number of rows each."""

    slots: int
    capacity: int
    tensors: tuple[torch.Tensor, ...]


class BufferArena:
    """The rooms of one target or draft. Its stores and windows take them and, when they are freed, give them back. One
    idle room of each kind is kept."""

    def __init__(self) -> None:
        # By everything else that the tensors depend on. The garbage collector gives rooms back at any moment, in any
        # thread: what happens to the dict is one operation each.
        self._idle: dict[Hashable, ArenaBuffers] = {}
        memory_info.reclaimables.add(self)

    def acquire(
        self,
        owner: object,
        key: Hashable,
        slots: int,
        capacity: int,
        allocate: Callable[[int, int], tuple[torch.Tensor, ...]],
    ) -> ArenaBuffers:
        """The idle room if it is large enough, or a new one; given back when ``owner`` is freed.

        Args:
            user: reads the tensors; nobody else does after it is freed.
            make: makes the tensors for (slots, capacity).

        Raises:
            MemoryBudgetError: ``allocate`` does, for the smallest room that is large enough.
        """
        room = self._idle.pop(key, None)
        if room is None or room.slots < slots or room.capacity < capacity:
            del room  # one that is too small is freed first
            larger = round_up_capacity(capacity)
            try:
                room = ArenaBuffers(slots, larger, allocate(slots, larger))
            except MemoryBudgetError:
                if larger == capacity:
                    raise
                room = ArenaBuffers(slots, capacity, allocate(slots, capacity))
        weakref.finalize(owner, self._idle.__setitem__, key, room).atexit = False
        return room

    def reclaim(self) -> bool:
        """Frees idle rooms, and the recordings in them. Returns whether there were any."""
        had = bool(self._idle)
        self._idle.clear()
        return had


def round_up_capacity(capacity: int) -> int:
    """The capacity, rounded up to a power of two or one of the classes below it."""
    step = max(1, (1 << (capacity - 1).bit_length()) // 2 // STEPS_PER_DOUBLING)
    return -(-capacity // step) * step
