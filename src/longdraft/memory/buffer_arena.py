"""Buffer arena: device memory of KV stores and views that is reused from one run to the next.

A CUDA graph (:mod:`longdraft.model.gpu.cuda_graphs`) fixes the addresses of its tensors. So an arena keeps the memory
of a freed store: the next store with the same key takes this memory, and replays the graphs captured on it. Capacities
are rounded up, so that prompts of similar lengths share buffers. Only devices that capture graphs use an arena. Idle
buffers are freed as soon as an allocation would otherwise fail.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from longdraft.errors import MemoryBudgetError
from longdraft.memory import memory_info

# Capacities are rounded to this many steps between a power of two and the next one, which wastes an eighth at most.
STEPS_PER_DOUBLING = 8


@dataclass(eq=False)
class ArenaBuffers:
    """Tensors for ``slots`` sequences of ``capacity`` tokens each."""

    slots: int
    capacity: int
    tensors: tuple[torch.Tensor, ...]


class BufferArena:
    """Lends buffers to the stores and views of one target or draft. Buffers are idle again when their borrower is
    freed. The arena keeps one idle :class:`ArenaBuffers` for each key."""

    def __init__(self) -> None:
        # No lock: each change is one atomic operation, because finalizers return buffers at any moment, in any thread.
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
            key: everything that the tensors depend on, except slots and capacity.
            allocate: makes the tensors for (slots, capacity).

        Raises:
            MemoryBudgetError: even buffers of exactly ``capacity`` do not fit; ``allocate`` raises it.
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
        weakref.finalize(owner, self._idle.__setitem__, key, buffers).atexit = False  # needless when Python ends
        return buffers

    def reclaim(self) -> bool:
        """Frees idle buffers and the graphs that read them. Returns whether there were any."""
        had_idle = bool(self._idle)
        self._idle.clear()
        return had_idle


def round_up_capacity(capacity: int) -> int:
    """Rounds a capacity up to the next of the :data:`STEPS_PER_DOUBLING` steps to a power of two."""
    step = max(1, (1 << (capacity - 1).bit_length()) // 2 // STEPS_PER_DOUBLING)
    return -(-capacity // step) * step
