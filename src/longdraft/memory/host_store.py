"""A KV store in host memory for a target on a GPU: on the device are two layers at a time.

Two staging buffers take turns. While a layer computes, a side stream copies the next layer's rows into the other
buffer, and the rows that the layer has added back to the host; nothing else ever travels.

A staging buffer is a cache of the host's rows: its rows ``[0, valid)`` of a slot equal the host's, once the copies that
were asked for are done. Whoever changes rows on the host lowers ``valid``. Copies run in order on one stream, so what
went to the host can be read back from there without waiting in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from longdraft.attention.block import Block
from longdraft.memory import sizes
from longdraft.memory.store import KVShape, KVStore


class Side(Protocol):
    """Where copies run beside the computation."""

    def begin(self) -> None:
        """Copies from here on wait for what the device has been asked to compute so far."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Asks for a copy. Both are contiguous, the one on the host pinned, or it would not run beside anything."""

    def mark(self) -> Any:
        """A mark behind all copies asked for so far."""

    def wait(self, mark: Any) -> None:
        """The computation waits for the copies before the mark; the host does not."""

    def settle(self) -> None:
        """The host waits for all copies."""


class CudaSide:
    """A CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        for tensor in (to, source):
            if tensor.is_cuda:  # a store that goes while this runs must not give its memory away yet
                tensor.record_stream(self._stream)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def settle(self) -> None:
        self._stream.synchronize()


class NoSide:
    """Copies at once: a device that is the host."""

    def begin(self) -> None: ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def mark(self) -> Any: ...

    def wait(self, mark: Any) -> None: ...

    def settle(self) -> None: ...


@dataclass
class _Stage:
    """A buffer on the device.

    Attributes:
        tensors: keys and values of one layer, (slots, capacity, kv_heads, head_dim).
        layer: whose rows it holds.
        valid: rows of each slot that equal the host's.
        mark: behind the copies from or into it that nobody has waited for.
    """

    tensors: tuple[torch.Tensor, torch.Tensor]
    layer: int
    valid: list[int]
    mark: Any = None


class HostStore(KVStore):
    """A :class:`KVStore` with keys and values in (pinned) host memory, for attention on ``device``.

    ``keys`` and ``values`` are on the host; read or write them through :meth:`stored` and :meth:`put_rows`, which
    wait for copies under way. What :meth:`layer` returns is on the device, not to be written to, and good until
    another layer is asked for.
    Rows of a slot lie together, all heads of a token side by side, so that a copy is one piece: ``transposed_keys``
    is for attention on a CPU and does not exist here. Features stay on the device.

    Args:
        device: where attention runs.
        side: where copies run; None takes a stream of the device.

    Raises:
        MemoryBudgetError: when the host has no room for the cache, or the device none for two layers of it.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        capacity: int,
        device: torch.device | str,
        feature_layers: tuple[int, ...] = (),
        feature_size: int = 0,
        side: Side | None = None,
    ) -> None:
        where = torch.device(device)
        self._side: Side = side or (CudaSide(where) if where.type == "cuda" else NoSide())
        super().__init__(shape, slots, capacity, where, False, feature_layers, feature_size)
        size = (slots, capacity, shape.kv_heads, shape.head_dim)
        self._stages = [
            _Stage((self._staging(size), self._staging(size)), layer, [0] * slots)
            for layer in range(min(2, shape.layers))
        ]
        self._current = self._stages[0]
        # The layer that the forward in progress is at; its stage holds more than the committed rows.
        self._written: int | None = None

    def _staging(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(size, dtype=self.shape.dtype, device=self.device)

    def _allocate(self, transposed_keys: bool, beside: int) -> tuple[torch.Tensor, torch.Tensor]:
        what, total = f"A cache of {self.capacity} tokens", self.bytes_for(self.shape, self.slots, self.capacity)
        pinned = self.device.type == "cuda"
        # torch rounds a pinned tensor up to a power of two.
        on_host = 2 * _power_of_two(total // 2) if pinned else total
        sizes.require(on_host, torch.device("cpu"), f"{what}, offloaded to the host,")
        staged = total // self.shape.layers * min(2, self.shape.layers)
        sizes.require(staged + beside, self.device, f"{what}, two layers at a time,")
        size = (self.shape.layers, self.slots, self.capacity, self.shape.kv_heads, self.shape.head_dim)
        self._host = [torch.empty(size, dtype=self.shape.dtype, pin_memory=pinned) for _ in "kv"]
        return self._host[0].transpose(2, 3), self._host[1].transpose(2, 3)

    # --- on the device: a forward, and drafters that read a layer ---

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, block: Block) -> None:
        # Earlier rows of the tree are attended to as the prefix is: they too may have to be fetched.
        places = [(slot, n + block.offset) for slot, n in zip(block.slots, block.lengths, strict=True)]
        stage = self._current = self._stage(layer)
        self._fill(stage, places)
        self._wait(stage)
        self._side_copies(stage, k, v, places)
        # Last, so that it queues behind the few rows that go to the host.
        self._fill(self._stage((layer + 1) % self.shape.layers), places)
        self._written = layer

    def _side_copies(self, stage: _Stage, k: torch.Tensor, v: torch.Tensor, places: list[tuple[int, int]]) -> None:
        """Writes a block's rows into the stage, and has them copied to the host.

        Args:
            places: slot and first row of each sequence's.
        """
        size = k.shape[2]
        for b, (slot, start) in enumerate(places):
            for staged, new in zip(stage.tensors, (k, v), strict=True):
                staged[slot, start : start + size] = new[b].transpose(0, 1)
            stage.valid[slot] = start + size
        self._side.begin()
        for slot, start in places:
            for host, staged in zip(self._host, stage.tensors, strict=True):
                rows = slice(start, start + size)
                self._side.copy(host[stage.layer, slot, rows], staged[slot, rows])
        # Whoever writes there next has to wait until they are copied.
        stage.mark = self._side.mark()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        index %= self.shape.layers
        stage = self._current = self._stage(index)
        if index != self._written:
            needed = [(slot, self.readable(slot)) for slot in range(self.slots)]
            self._fill(stage, needed)
            self._wait(stage)
            # Whoever reads one layer after another finds the next one there too.
            self._fill(self._stage((index + 1) % self.shape.layers), needed)
        keys, values = stage.tensors
        return keys.transpose(1, 2), values.transpose(1, 2)

    def write_features(self, hidden: Mapping[int, torch.Tensor], block: Block) -> None:
        self._written = None  # the forward is over
        super().write_features(hidden, block)

    def _stage(self, layer: int) -> _Stage:
        """The stage that holds a layer; else the one not in use, emptied for it."""
        for stage in self._stages:
            if stage.layer == layer:
                return stage
        free = next(stage for stage in self._stages if stage is not self._current)
        free.layer, free.valid = layer, [0] * self.slots
        return free

    def _fill(self, stage: _Stage, needed: Iterable[tuple[int, int]]) -> None:
        """Has the rows copied from the host that the stage lacks.

        Args:
            needed: slots, and how many rows of each.
        """
        missing = [(slot, stage.valid[slot], rows) for slot, rows in needed if stage.valid[slot] < rows]
        if not missing:
            return
        self._side.begin()
        for slot, start, end in missing:
            for host, staged in zip(self._host, stage.tensors, strict=True):
                self._side.copy(staged[slot, start:end], host[stage.layer, slot, start:end])
            stage.valid[slot] = end
        stage.mark = self._side.mark()

    def _wait(self, stage: _Stage) -> None:
        if stage.mark is not None:
            self._side.wait(stage.mark)
            stage.mark = None

    # --- on the host: commits, truncations, rows in and out ---

    def stored(self, slot: int, layers: slice, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        self._side.settle()
        self._forget(slot, start)
        return super().stored(slot, layers, start)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        super().commit(slot, path)
        self._written = None

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self._forget(slot, length)

    def _forget(self, slot: int, start: int) -> None:
        """Rows from ``start`` on may differ from the host's now."""
        self._written = None
        for stage in self._stages:
            stage.valid[slot] = min(stage.valid[slot], start)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
