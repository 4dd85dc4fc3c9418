"""Buffer arena: device memory of KV stores and views that is reused from one run to the next.

A CUDA graph (:mod:`longdraft.model.gpu.graphs`) fixes the addresses of its tensors. So the memory that it reads
outlives the store that used it: the next store with the same key takes the memory, and its graphs are valid for it.
Capacities are rounded up, so that prompts of similar lengths share buffers. Only devices that capture graphs use an
arena. Its idle buffers are freed as soon as something else needs the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from longdraft.errors import MemoryBudgetError
from longdraft.memory import memory_info

# Capacities between a power of two and the next one; rounding up costs an eighth at most.
STEPS_PER_DOUBLING = 8


@dataclass(eq=False)
class ArenaBuffers:
    """Tensors for ``slots`` sequences of ``capacity`` tokens each."""

    slots: int
    capacity: int
    tensors: tuple[torch.Tensor, ...]


class BufferArena:
    """The buffers of one target or draft. A store or view acquires buffers, and they are idle again when it is freed.
    The arena keeps one idle set of buffers for each key."""

    def __init__(self) -> None:
        # Each change is one operation, as the garbage collector gives buffers back at any moment, in any thread.
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
        """Returns idle buffers that are large enough, else new ones. When ``owner`` is freed, they are idle again.

        Args:
            owner: the object that reads the tensors; nothing may read them after it is freed.
            key: everything but slots and capacity that the tensors depend on.
            allocate: makes the tensors for (slots, capacity).

        Raises:
            MemoryBudgetError: ``allocate`` raises it for the smallest buffers that are large enough.
        """
        buffers = self._idle.pop(key, None)
        if buffers is None or buffers.slots < slots or buffers.capacity < capacity:
            del buffers  # too small: free them before allocating
            rounded = round_up_capacity(capacity)
            try:
                buffers = ArenaBuffers(slots, rounded, allocate(slots, rounded))
            except MemoryBudgetError:
                if rounded == capacity:
                    raise
                buffers = ArenaBuffers(slots, capacity, allocate(slots, capacity))
        weakref.finalize(owner, self._idle.__setitem__, key, buffers).atexit = False
        return buffers

    def reclaim(self) -> bool:
        """Frees idle buffers and the graphs that read them. Returns whether there were any."""
        had_idle = bool(self._idle)
        self._idle.clear()
        return had_idle


def round_up_capacity(capacity: int) -> int:
    """Rounds a capacity up to a power of two or to one of the steps below it."""
    step = max(1, (1 << (capacity - 1).bit_length()) // 2 // STEPS_PER_DOUBLING)
    return -(-capacity // step) * step
