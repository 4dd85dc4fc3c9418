"""Buffer arena: device memory of KV stores and views that is reused from one run to the next.

A CUDA graph (:mod:`longdraft.model.gpu.cuda_graphs`) fixes the addresses of tensors. So an arena keeps the memory of a
freed store: the next store with the same key takes this memory, and replays the graphs that were captured on it.
Capacities are rounded up, so that prompts of similar lengths share buffers. Only devices that capture graphs use an
arena. Idle buffers are freed if an allocation would otherwise fail.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from longdraft.errors import MemoryBudgetError
from longdraft.memory import memory_info

# Between two powers of two there are this many capacities. Rounding up to one of them adds at most an eighth.
STEPS_PER_DOUBLING = 8


@dataclass(eq=False)
class ArenaBuffers:
    """Tensors for ``slots`` sequences of ``capacity`` tokens each."""

    slots: int
    capacity: int
    tensors: tuple[torch.Tensor, ...]


class BufferArena:
    """Lends buffers to the stores and views of one target or draft. When a store or view is freed, its buffers become
    idle. The arena keeps one idle :class:`ArenaBuffers` for each key."""

    def __init__(self) -> None:
        # Finalizers return buffers at any moment, in any thread. No lock is needed: each change of the dict is atomic.
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
        """Returns idle buffers for at least ``slots`` sequences of ``capacity`` tokens, else new buffers.

        Args:
            owner: the object that reads the tensors. When ``owner`` is freed, the buffers become idle.
            key: everything that the tensors depend on, except slots and capacity.
            slots: number of sequences.
            capacity: number of tokens of a sequence.
            allocate: makes the tensors for (slots, capacity).

        Raises:
            MemoryBudgetError: even buffers of exactly ``capacity`` do not fit; ``allocate`` raises this error.
        """
        buffers = self._idle.pop(key, None)
        if buffers is None or buffers.slots < slots or buffers.capacity < capacity:
            del buffers  # frees buffers that are too small, before new buffers are allocated
            rounded = round_up_capacity(capacity)
            try:
                buffers = ArenaBuffers(slots, rounded, allocate(slots, rounded))
            except MemoryBudgetError:
                if rounded == capacity:
                    raise
                buffers = ArenaBuffers(slots, capacity, allocate(slots, capacity))
        weakref.finalize(owner, self._idle.__setitem__, key, buffers).atexit = False  # not needed when Python ends
        return buffers

    def reclaim(self) -> bool:
        """Frees idle buffers, and the graphs that read them. Returns True if there were idle buffers."""
        had_idle = bool(self._idle)
        self._idle.clear()
        return had_idle


def round_up_capacity(capacity: int) -> int:
    """Rounds a capacity up to one of the :data:`STEPS_PER_DOUBLING` capacities between two powers of two."""
    power_of_two = (1 << (capacity - 1).bit_length()) // 2  # the largest power of two below the capacity
    step = max(1, power_of_two // STEPS_PER_DOUBLING)
    return -(-capacity // step) * step
