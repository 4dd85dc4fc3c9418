"""Rooms: device memory of stores and windows that is kept from one run to the next.

A recorded forward (:mod:`longdraft.model.graphs`) holds for the addresses that it was recorded with. So the memory that
it reads outlives the store that used it: the next store of its kind takes the same memory, and finds the recordings.
Capacities are rounded up, so that texts of similar lengths share a room. Rooms are only used on devices where forwards
are recorded; they are freed as soon as something else needs the memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable

import torch

from longdraft.errors import MemoryBudgetError
from longdraft.memory import sizes

# Classes of capacities between a power of two and the next, so that rounding costs an eighth at most.
CLASSES = 8

Make = Callable[[int, int], tuple[torch.Tensor, ...]]


class Room:
    """Tensors for a number of slots with a number of rows each.

    Attributes:
        kind: everything else that the tensors depend on.
    """

    def __init__(self, kind: Hashable, slots: int, capacity: int, tensors: tuple[torch.Tensor, ...]) -> None:
        self.kind, self.slots, self.capacity, self.tensors = kind, slots, capacity, tensors


class Rooms:
    """The rooms of one target or draft. Its stores and windows take them and, when they are freed, give them back. One
    idle room of each kind is kept."""

    def __init__(self) -> None:
        self._idle: list[Room] = []  # one of a kind
        self._lock = threading.RLock()  # the garbage collector gives rooms back at any moment, in any thread
        sizes.spare.add(self)

    def take(self, user: object, kind: Hashable, slots: int, capacity: int, make: Make) -> Room:
        """The idle room if it is large enough, or a new one; given back when ``user`` is freed.

        Args:
            user: reads the tensors; nobody else does after it is freed.
            make: makes the tensors for (slots, capacity).

        Raises:
            MemoryBudgetError: ``make`` does, for the smallest room that is large enough.
        """
        room = self._idle_one(kind, slots, capacity) or self._made(kind, slots, capacity, make)
        weakref.finalize(user, self._back, room).atexit = False
        return room

    def _idle_one(self, kind: Hashable, slots: int, capacity: int) -> Room | None:
        """Takes the idle room of a kind; if it is too small, frees it."""
        with self._lock:
            room = next((each for each in self._idle if each.kind == kind), None)
            self._idle = [each for each in self._idle if each is not room]
            return room if room is not None and room.slots >= slots and room.capacity >= capacity else None

    def _made(self, kind: Hashable, slots: int, capacity: int, make: Make) -> Room:
        larger = rounded(capacity)
        try:
            return Room(kind, slots, larger, make(slots, larger))
        except MemoryBudgetError:
            if larger == capacity:
                raise
        return Room(kind, slots, capacity, make(slots, capacity))

    def _back(self, room: Room) -> None:
        with self._lock:
            self._idle = [each for each in self._idle if each.kind != room.kind] + [room]

    def drop(self) -> bool:
        """Frees idle rooms, and the recordings in them. Returns whether there were any."""
        with self._lock:
            idle, self._idle = self._idle, []
            return bool(idle)


def rounded(capacity: int) -> int:
    """The capacity, rounded up to a power of two or one of the classes below it."""
    step = max(1, (1 << (capacity - 1).bit_length()) // 2 // CLASSES)
    return -(-capacity // step) * step
