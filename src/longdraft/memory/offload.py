"""Offload: keeps keys and values outside the memory of the GPU that computes."""

from __future__ import annotations

import torch

from longdraft.errors import CapabilityError, RequestError
from longdraft.memory.host_store import HostStore
from longdraft.memory.rooms import Rooms
from longdraft.memory.store import KVShape, KVStore

# None for no offload, "host" or "host:N" for host memory: the GPU keeps N layers, or as many as fit.
Offload = str | None


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
    rooms: Rooms | None = None,
    dtype: torch.dtype | None = None,
) -> KVStore:
    """Makes the kind of :class:`KVStore` that ``offload`` asks for; on the device with ``rooms`` and ``dtype``."""
    if offload is None:
        return KVStore(shape, slots, capacity, device, transposed_keys, feature_layers, feature_size, rooms, dtype)
    count = offload.partition(":")[2]
    resident = int(count) if count else None
    return HostStore(shape, slots, capacity, device, feature_layers, feature_size, resident=resident)
