"""Offload: keeps keys and values in host memory for a target on a GPU. The GPU keeps as many layers as fit.

The other, streamed layers are spread evenly between these resident layers, so that a copy may take as long as the
computation of several layers. Two staging buffers take turns: while a layer computes with one buffer, a side stream
copies the next streamed layer's entries into the other buffer, and the layer's new entries back to the host.

A staging buffer caches entries: after the pending copies, a slot's first ``num_valid`` entries equal the entries on the
host. Code that changes entries on the host lowers ``num_valid``. All copies run in order on one stream, so an entry can
be copied to the host and back without a wait in between.
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
from longdraft.memory.store import KVShape, KVStore, StoreConfig

# None: no offload. "host": as many layers stay on the GPU as fit. "host:N": N layers stay on the GPU.
Offload = str | None
# Resident layers of "host" take at most this fraction of the free memory; the KV caches of drafts need the rest later.
DEVICE_MEMORY_FRACTION = 0.6


class CopyStream:
    """Runs copies on a CUDA stream of its own, in parallel with the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def wait_for_compute(self) -> None:
        """Makes the next copies wait for all computations that the device has queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy. Copy and computation overlap only if both tensors are contiguous, and the host's is pinned."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:  # keeps the memory until the copy is done, even if the store is freed before
                tensor.record_stream(self._stream)

    def record_event(self) -> Any:
        """Returns a CUDA event that fires once all copies queued so far are done."""
        return self._stream.record_event()

    def wait_event(self, event: Any) -> None:
        """Makes the computation wait for the copies before the event. The host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        """Makes the host wait for all copies."""
        self._stream.synchronize()


@dataclass
class _Stage:
    """A staging buffer on the device.

    Attributes:
        tensors: keys and values of one layer, (slots, capacity, kv_heads, head_dim).
        layer: index of the layer.
        num_valid: for each slot, the number of leading entries that equal the entries on the host.
        event: fires after the pending copies of this stage; None if the computation has waited for all copies.
    """

    tensors: tuple[torch.Tensor, torch.Tensor]
    layer: int
    num_valid: list[int]
    event: Any = None


class OffloadedKVStore(KVStore):
    """A :class:`KVStore` with the streamed layers in pinned host memory, for attention on ``device``.

    ``keys`` and ``values`` are the streamed layers on the host. :meth:`slot_kv` and :meth:`write_entries` work for any
    layer, and wait for pending copies. :meth:`layer` returns tensors on the device, which are read-only and valid until
    the next call of :meth:`layer`. In memory the heads of a token are adjacent, so a range of entries is one copy.
    Features stay on the device. ``streamed_layers``: the streamed layers.

    Args:
        device: the device that computes attention. Other arguments are as in :class:`KVStore`, which documents the
            methods that have no docstring here.
        config: as in :class:`KVStore`; its dtype and its layout of keys have no effect.
        copy_stream: runs the copies; None: a new stream of the device.
        num_resident: number of resident layers; the last layer is one of them unless this is 0; None: as many as fit.

    Raises:
        MemoryBudgetError: the streamed layers do not fit the host, or the other buffers do not fit the device.
    """

    is_resident = False

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        capacity: int,
        device: torch.device | str,
        config: StoreConfig | None = None,
        copy_stream: CopyStream | None = None,
        num_resident: int | None = 0,
    ) -> None:
        self._num_resident = num_resident
        super().__init__(shape, slots, capacity, device, config)
        self._copy_stream = copy_stream or CopyStream(self.device)
        layer_size = self._host[0].shape[1:]
        self._stages = []
        for layer in self.streamed_layers[:2]:
            keys, values = (torch.empty(layer_size, dtype=shape.dtype, device=self.device) for _ in range(2))
            self._stages.append(_Stage((keys, values), layer, [0] * slots))
        self._current_stage: _Stage | None = self._stages[0] if self._stages else None
        # The layer that the current forward wrote last: its stage has all entries, so layer() copies nothing.
        self._written_layer: int | None = None

    def _allocate(self, feature_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        layers, pinned = self.shape.layers, self.device.type == "cuda"
        layer_bytes = self.shape.bytes_per_token * self.slots * self.capacity // layers
        self.streamed_layers = self._choose_streamed(layer_bytes, feature_bytes)
        num_streamed = len(self.streamed_layers)
        num_resident, streamed_bytes = layers - num_streamed, layer_bytes * num_streamed
        # torch rounds each of the two pinned tensors, keys and values, up to a power of two.
        host_bytes = 2 * _round_up_to_power_of_two(streamed_bytes // 2) if pinned and streamed_bytes else streamed_bytes
        memory_info.require_bytes(host_bytes, torch.device("cpu"), f"{self._description}, offloaded to the host,")
        device_bytes = layer_bytes * (num_resident + min(2, num_streamed)) + feature_bytes
        parts = f"{num_resident} resident layers and two staging buffers" if num_resident else "two staging buffers"
        purpose = f"{self._description}, of which {parts} stay on the device,"
        memory_info.require_bytes(device_bytes, self.device, purpose)
        size, dtype = (self.slots, self.capacity, self.shape.kv_heads, self.shape.head_dim), self.shape.dtype
        self._host = [torch.empty(num_streamed, *size, dtype=dtype, pin_memory=pinned, device="cpu") for _ in range(2)]
        self._resident = [torch.empty(num_resident, *size, dtype=dtype, device=self.device) for _ in range(2)]
        # For each layer: its index in ``_host`` or ``_resident``, and the next streamed layer, cyclically.
        is_streamed = [layer in self.streamed_layers for layer in range(layers)]
        self._tensor_index = [is_streamed[:layer].count(is_streamed[layer]) for layer in range(layers)]
        self._next_streamed = [
            next((s for s in self.streamed_layers if s > layer), self.streamed_layers[0]) if num_streamed else 0
            for layer in range(layers)
        ]
        return self._host[0].transpose(2, 3), self._host[1].transpose(2, 3)

    def _choose_streamed(self, layer_bytes: int, feature_bytes: int) -> tuple[int, ...]:
        """Returns the streamed layers: divides the layers into groups of about equal size, and takes the first layer of
        each group, so the last layer is resident unless all layers are streamed."""
        layers, num_resident = self.shape.layers, self._num_resident
        if num_resident is None:
            free = memory_info.available_bytes(self.device) or 0
            fit = int(DEVICE_MEMORY_FRACTION * free - feature_bytes) // max(1, layer_bytes)
            num_resident = layers if fit >= layers else fit - 2  # two staging buffers take the space of two layers
        num_streamed = layers - min(layers, max(0, num_resident))
        return tuple(i * layers // num_streamed for i in range(num_streamed))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        # (slot, index of the first new entry). The stage may lack entries before it, so they are copied first.
        starts = [(slot, n + batch.tree_offset) for slot, n in zip(batch.slots, batch.prefix_lens, strict=True)]
        if layer not in self.streamed_layers:
            for kv, new in zip(self._resident, (k, v), strict=True):
                for b, (slot, start) in enumerate(starts):
                    kv[self._tensor_index[layer], slot, start : start + k.shape[2]] = new[b].transpose(0, 1)
            if self.streamed_layers:
                self._fill(self._stage_for(self._next_streamed[layer]), starts)
            return
        stage = self._current_stage = self._stage_for(layer)
        self._fill(stage, starts)
        self._wait(stage)
        self._write_back(stage, k, v, starts)
        # The prefetch comes last, because this long copy would delay the few entries that go to the host.
        self._fill(self._stage_for(self._next_streamed[layer]), starts)
        self._written_layer = layer

    def _write_back(self, stage: _Stage, k: torch.Tensor, v: torch.Tensor, starts: list[tuple[int, int]]) -> None:
        """Writes a batch's KV into the stage, and queues copies to the host. ``starts``: (slot, first new entry)."""
        query_len = k.shape[2]
        for b, (slot, start) in enumerate(starts):
            for staged, new in zip(stage.tensors, (k, v), strict=True):
                staged[slot, start : start + query_len] = new[b].transpose(0, 1)
            stage.num_valid[slot] = start + query_len
        self._copy_stream.wait_for_compute()
        for slot, start in starts:
            for host, staged in zip(self._host, stage.tensors, strict=True):
                added = slice(start, start + query_len)
                self._copy_stream.copy(host[self._tensor_index[stage.layer], slot, added], staged[slot, added])
        # The next write to this stage waits for the copies.
        stage.event = self._copy_stream.record_event()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        index %= self.shape.layers
        if index not in self.streamed_layers:
            keys, values = (kv[self._tensor_index[index]] for kv in self._resident)
            return keys.transpose(1, 2), values.transpose(1, 2)
        stage = self._current_stage = self._stage_for(index)
        if index != self._written_layer:
            needed = [(slot, self.readable_len(slot)) for slot in range(self.slots)]
            self._fill(stage, needed)
            self._wait(stage)
            # Prefetches the next streamed layer, because callers read one layer after another.
            self._fill(self._stage_for(self._next_streamed[index]), needed)
        keys, values = stage.tensors
        return keys.transpose(1, 2), values.transpose(1, 2)

    def write_features(self, hidden: Mapping[int, torch.Tensor], batch: ForwardBatch) -> None:
        self._written_layer = None  # the forward is over
        super().write_features(hidden, batch)

    def _stage_for(self, layer: int) -> _Stage:
        """Returns the stage with a layer's entries. If there is none, empties the unused stage for the layer."""
        for stage in self._stages:
            if stage.layer == layer:
                return stage
        unused = next(stage for stage in self._stages if stage is not self._current_stage)
        unused.layer, unused.num_valid = layer, [0] * self.slots
        return unused

    def _fill(self, stage: _Stage, needed: Iterable[tuple[int, int]]) -> None:
        """Queues copies of the entries that the stage lacks. ``needed``: (slot, number of leading entries)."""
        missing = [(slot, stage.num_valid[slot], end) for slot, end in needed if stage.num_valid[slot] < end]
        if not missing:
            return
        self._copy_stream.wait_for_compute()
        for slot, start, end in missing:
            for host, staged in zip(self._host, stage.tensors, strict=True):
                self._copy_stream.copy(staged[slot, start:end], host[self._tensor_index[stage.layer], slot, start:end])
            stage.num_valid[slot] = end
        stage.event = self._copy_stream.record_event()

    def _wait(self, stage: _Stage) -> None:
        """Makes the computation wait for the pending copies of a stage."""
        if stage.event is not None:
            self._copy_stream.wait_event(stage.event)
            stage.event = None

    @property
    def layer_groups(self) -> list[slice]:
        return [slice(layer, layer + 1) for layer in range(self.shape.layers)]

    def slot_kv(self, slot: int, layers: slice, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        group = slice(self._tensor_index[layers.start], self._tensor_index[layers.start] + 1)
        if layers.start not in self.streamed_layers:
            keys, values = (kv[group, slot].transpose(1, 2) for kv in self._resident)
            return keys, values
        self._copy_stream.synchronize()
        self._invalidate(slot, start)
        return super().slot_kv(slot, group, start)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        super().commit(slot, path)
        self._written_layer = None

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self._invalidate(slot, length)

    def _invalidate(self, slot: int, start: int) -> None:
        """Makes all stages copy a slot's entries from ``start`` on again, because the host's entries change."""
        self._written_layer = None
        for stage in self._stages:
            stage.num_valid[slot] = min(stage.num_valid[slot], start)


def _round_up_to_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def parse(option: str | None) -> Offload:
    """Returns the user's option ``offload`` unchanged; raises RequestError unless it is None, "host" or "host:N"."""
    if option is None:
        return None
    name, colon, num_resident = str(option).partition(":")
    if name != "host":
        raise RequestError(f"offload takes host or host:N, got {str(option)!r}.")
    if colon and not num_resident.isdecimal():
        raise RequestError(f"offload=host:N needs a whole number N, the layers that stay on the GPU, got {option!r}")
    return str(option)


def check(offload: Offload, device: torch.device) -> None:
    """Raises CapabilityError if ``offload`` is not None, and the device is not an NVIDIA GPU."""
    if offload is not None and device.type != "cuda":
        raise CapabilityError(
            f"Offload needs a model on an NVIDIA GPU, and this one is on {device}: leave offload out."
        )


def new_store(
    offload: Offload,
    shape: KVShape,
    slots: int,
    capacity: int,
    device: torch.device,
    config: StoreConfig,
    buffer_arena: BufferArena | None,
) -> KVStore:
    """Makes a KV store. With ``offload``, ``buffer_arena`` is ignored."""
    if offload is None:
        return KVStore(shape, slots, capacity, device, config, buffer_arena)
    number = offload.partition(":")[2]  # N of "host:N", empty for "host"
    num_resident = int(number) if number else None
    return OffloadedKVStore(shape, slots, capacity, device, config, num_resident=num_resident)
