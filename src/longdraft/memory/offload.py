"""Offload: keeps keys and values in host memory for a target on a GPU, which keeps as many layers as fit.

Streamed layers lie between kept ones, so that a copy has the time of several layers. Two staging buffers take turns.
While one layer computes, a side stream copies the next streamed layer's rows into the other buffer, and the rows that
the layer has added back to the host.

A staging buffer caches the host's rows: its rows ``[0, valid)`` of a slot equal the host's once the pending copies are
done. Code that changes rows on the host lowers ``valid``. Copies run in order on one stream, so rows that went to the
host can be read back without waiting in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import CapabilityError, RequestError
from longdraft.memory import memory_info
from longdraft.memory.buffer_arena import BufferArena
from longdraft.memory.store import KVShape, KVStore

# None for no offload, "host" or "host:N" for host memory: the GPU keeps N layers, or as many as fit.
Offload = str | None
# Share of the device's free memory that layers may take if nobody says how many; the rest is for drafts and views,
# which come later.
DEVICE_MEMORY_FRACTION = 0.6


class CopyStream:
    """Runs copies on a CUDA stream beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def wait_for_compute(self) -> None:
        """Makes the next copies wait for all computations that the device has queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy. Both tensors are contiguous and the one on the host is pinned, or it would not overlap."""
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        for tensor in (to, source):
            if tensor.is_cuda:  # a store freed meanwhile must keep its memory until the copy is done
                tensor.record_stream(self._stream)

    def record_event(self) -> Any:
        """Returns a mark behind all copies queued so far."""
        return self._stream.record_event()

    def wait_event(self, event: Any) -> None:
        """Makes the computation, not the host, wait for the copies before the mark."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        """Makes the host wait for all copies."""
        self._stream.synchronize()


@dataclass
class _Stage:
    """A buffer on the device.

    Attributes:
        tensors: keys and values of one layer, (slots, capacity, kv_heads, head_dim).
        layer: index of that layer.
        valid: number of leading rows of each slot that equal the host's.
        mark: behind the copies from or into the buffer that the computation has not waited for.
    """

    tensors: tuple[torch.Tensor, torch.Tensor]
    layer: int
    valid: list[int]
    mark: Any = None


class OffloadedKVStore(KVStore):
    """A :class:`KVStore` with keys and values in (pinned) host memory, for attention on ``device``.

    ``keys`` and ``values`` are those of the streamed layers, on the host; read and write rows of any layer through
    :meth:`slot_kv` and :meth:`write_entries`, which wait for pending copies. :meth:`layer` returns tensors on the device, to
    be read only, valid until another layer is asked for. All heads of a token are stored side by side, so that a range
    of rows is one copy (there are no ``transposed_keys``). Features stay on the device.

    Args:
        device: where attention runs.
        side: runs the copies; None takes a stream of the device.
        resident: number of layers that the device keeps, the last one first; None: as many as fit its free memory.

    Raises:
        MemoryBudgetError: the host has no room for the streamed layers, or the device none for the others and for two
            of these.
    """

    is_resident = False

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        capacity: int,
        device: torch.device | str,
        feature_layers: tuple[int, ...] = (),
        feature_size: int = 0,
        copy_stream: CopyStream | None = None,
        num_resident: int | None = 0,
    ) -> None:
        self._wanted = num_resident
        super().__init__(shape, slots, capacity, device, False, feature_layers, feature_size)
        self._side = copy_stream or CopyStream(self.device)
        staged = self._host[0].shape[1:]
        self._stages = []
        for layer in self.streamed_layers[:2]:
            keys, values = (torch.empty(staged, dtype=shape.dtype, device=self.device) for _ in "kv")
            self._stages.append(_Stage((keys, values), layer, [0] * slots))
        self._current: _Stage | None = self._stages[0] if self._stages else None
        # The layer that the forward in progress has written; its stage holds more than the committed rows.
        self._written: int | None = None

    def _allocate(self, transposed_keys: bool, beside: int) -> tuple[torch.Tensor, torch.Tensor]:
        layers, pinned = self.shape.layers, self.device.type == "cuda"
        each = self.bytes_for(self.shape, self.slots, self.capacity) // layers
        self.streamed_layers = self._streamed(each, beside)
        kept, total = layers - len(self.streamed_layers), each * len(self.streamed_layers)
        # torch rounds a pinned tensor up to a power of two.
        on_host = 2 * _power_of_two(total // 2) if pinned and total else total
        memory_info.require_bytes(on_host, torch.device("cpu"), f"{self._name}, offloaded to the host,")
        near = each * (kept + min(2, len(self.streamed_layers)))
        what = f"{kept} layers and two at a time," if kept else "two layers at a time,"
        memory_info.require_bytes(near + beside, self.device, f"{self._name}, {what}")
        size = self.slots, self.capacity, self.shape.kv_heads, self.shape.head_dim
        dtype, count = self.shape.dtype, len(self.streamed_layers)
        self._host = [torch.empty(count, *size, dtype=dtype, pin_memory=pinned, device="cpu") for _ in "kv"]
        self._kept = [torch.empty(kept, *size, dtype=dtype, device=self.device) for _ in "kv"]
        # A layer's place among those of its kind, and the first streamed layer behind it.
        far = [layer in self.streamed_layers for layer in range(layers)]
        self._places = [far[:layer].count(far[layer]) for layer in range(layers)]
        self._next = [
            next((s for s in self.streamed_layers if s > layer), *self.streamed_layers[:1]) if total else 0
            for layer in range(layers)
        ]
        return self._host[0].transpose(2, 3), self._host[1].transpose(2, 3)

    def _streamed(self, each: int, beside: int) -> tuple[int, ...]:
        """The layers that the device does not keep, each of ``each`` bytes: the first of equal groups."""
        layers, kept = self.shape.layers, self._wanted
        if kept is None:
            free = memory_info.available_bytes(self.device) or 0
            fit = int(DEVICE_MEMORY_FRACTION * free - beside) // max(1, each)
            kept = layers if fit >= layers else fit - 2  # all, or some and the two of the stages
        count = layers - min(layers, max(0, kept))
        return tuple(i * layers // count for i in range(count))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        # Attention reads earlier rows of the tree as well as the prefix: both may have to be fetched.
        places = [(slot, n + batch.tree_offset) for slot, n in zip(batch.slots, batch.prefix_lens, strict=True)]
        if layer not in self.streamed_layers:
            for rows, new in zip(self._kept, (k, v), strict=True):
                for b, (slot, start) in enumerate(places):
                    rows[self._places[layer], slot, start : start + k.shape[2]] = new[b].transpose(0, 1)
            if self.streamed_layers:
                self._fill(self._stage(self._next[layer]), places)
            return
        stage = self._current = self._stage(layer)
        self._fill(stage, places)
        self._wait(stage)
        self._add_rows(stage, k, v, places)
        # Last, so that it queues behind the few rows that go to the host.
        self._fill(self._stage(self._next[layer]), places)
        self._written = layer

    def _add_rows(self, stage: _Stage, k: torch.Tensor, v: torch.Tensor, places: list[tuple[int, int]]) -> None:
        """Writes a block's rows into the stage and queues their copies to the host; places: (slot, first row)."""
        size = k.shape[2]
        for b, (slot, start) in enumerate(places):
            for staged, new in zip(stage.tensors, (k, v), strict=True):
                staged[slot, start : start + size] = new[b].transpose(0, 1)
            stage.valid[slot] = start + size
        self._side.wait_for_compute()
        for slot, start in places:
            for host, staged in zip(self._host, stage.tensors, strict=True):
                rows = slice(start, start + size)
                self._side.copy(host[self._places[stage.layer], slot, rows], staged[slot, rows])
        # The next write there has to wait for these copies.
        stage.mark = self._side.record_event()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        index %= self.shape.layers
        if index not in self.streamed_layers:
            keys, values = (rows[self._places[index]] for rows in self._kept)
            return keys.transpose(1, 2), values.transpose(1, 2)
        stage = self._current = self._stage(index)
        if index != self._written:
            needed = [(slot, self.readable_len(slot)) for slot in range(self.slots)]
            self._fill(stage, needed)
            self._wait(stage)
            # Callers that read one layer after another find the next one there too.
            self._fill(self._stage(self._next[index]), needed)
        keys, values = stage.tensors
        return keys.transpose(1, 2), values.transpose(1, 2)

    def write_features(self, hidden: Mapping[int, torch.Tensor], batch: ForwardBatch) -> None:
        self._written = None  # the forward is over
        super().write_features(hidden, batch)

    def _stage(self, layer: int) -> _Stage:
        """The stage that holds a layer, or the one not in use, emptied for the layer."""
        for stage in self._stages:
            if stage.layer == layer:
                return stage
        free = next(stage for stage in self._stages if stage is not self._current)
        free.layer, free.valid = layer, [0] * self.slots
        return free

    def _fill(self, stage: _Stage, needed: Iterable[tuple[int, int]]) -> None:
        """Queues copies of the rows that the stage lacks; needed: (slot, number of rows)."""
        missing = [(slot, stage.valid[slot], rows) for slot, rows in needed if stage.valid[slot] < rows]
        if not missing:
            return
        self._side.wait_for_compute()
        for slot, start, end in missing:
            for host, staged in zip(self._host, stage.tensors, strict=True):
                self._side.copy(staged[slot, start:end], host[self._places[stage.layer], slot, start:end])
            stage.valid[slot] = end
        stage.mark = self._side.record_event()

    def _wait(self, stage: _Stage) -> None:
        if stage.mark is not None:
            self._side.wait_event(stage.mark)
            stage.mark = None

    @property
    def layer_groups(self) -> list[slice]:
        return [slice(layer, layer + 1) for layer in range(self.shape.layers)]

    def slot_kv(self, slot: int, layers: slice, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        own = slice(self._places[layers.start], self._places[layers.start] + 1)
        if layers.start not in self.streamed_layers:
            keys, values = (rows[own, slot].transpose(1, 2) for rows in self._kept)
            return keys, values
        self._side.synchronize()
        self._forget(slot, start)
        return super().slot_kv(slot, own, start)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        super().commit(slot, path)
        self._written = None

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self._forget(slot, length)

    def _forget(self, slot: int, start: int) -> None:
        """Marks rows of all stages from ``start`` on as different from the host's."""
        self._written = None
        for stage in self._stages:
            stage.valid[slot] = min(stage.valid[slot], start)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def parse(option: str | None) -> Offload:
    """Reads a user's option: None, ``"host"`` or ``"host:N"``.

    Raises:
        RequestError: it is anything else.
    """
    if option is None:
        return None
    name, colon, count = str(option).partition(":")
    if name != "host":
        raise RequestError(f"offload takes host or host:N, got {str(option)!r}.")
    if colon and not count.isdecimal():
        raise RequestError(f"offload=host:N keeps N layers on the GPU, a whole number, got {option!r}")
    return str(option)


def check(offload: Offload, device: torch.device) -> None:
    """Raises CapabilityError if a device cannot offload."""
    if offload is not None and device.type != "cuda":
        raise CapabilityError(
            f"Offload is for a model on an NVIDIA GPU, this one is on {device}: leave the option out."
        )


def new_store(
    offload: Offload,
    shape: KVShape,
    slots: int,
    capacity: int,
    device: torch.device,
    transposed_keys: bool = False,
    feature_layers: tuple[int, ...] = (),
    feature_size: int = 0,
    buffer_arena: BufferArena | None = None,
    dtype: torch.dtype | None = None,
) -> KVStore:
    """Makes the kind of :class:`KVStore` that ``offload`` asks for; on the device with ``buffer_arena`` and ``dtype``."""
    if offload is None:
        return KVStore(
            shape, slots, capacity, device, transposed_keys, feature_layers, feature_size, buffer_arena, dtype
        )
    count = offload.partition(":")[2]
    resident = int(count) if count else None
    return OffloadedKVStore(shape, slots, capacity, device, feature_layers, feature_size, num_resident=resident)
