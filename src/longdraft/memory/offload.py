"""Offload: keeps keys and values outside the memory of the device that computes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from longdraft.errors import CapabilityError, CheckpointError, RequestError
from longdraft.memory.disk_store import DiskStore
from longdraft.memory.host_store import HostStore
from longdraft.memory.rooms import Rooms
from longdraft.memory.store import KVShape, KVStore

# None for no offload, "host" or "host:N" for host memory (of a GPU, which keeps N layers, or as many as fit), or a
# folder for a file (of a CPU).
Offload = str | Path | None

# The place that each kind of device can offload to.
_OFFLOADS = {"cuda": "host", "cpu": "disk"}


def parse(option: str | Path | None) -> Offload:
    """Reads a user's option: None, ``"host"``, ``"host:N"``, ``"disk"`` (a folder for temporary files), or a folder.

    Raises:
        CheckpointError: there is no such folder.
        RequestError: the option is no name of a folder.
    """
    if option is None or option == "host":
        return option
    if isinstance(option, str) and option.startswith("host:"):
        _resident(option)
        return option
    if not isinstance(option, str | Path):
        raise RequestError(f"offload takes host, disk or an existing folder, got {option!r}")
    folder = Path(tempfile.gettempdir() if option == "disk" else option)
    if option == "disk" and folder == Path("/tmp") and Path("/var/tmp").is_dir():
        folder = Path("/var/tmp")  # the other one may be kept in memory
    if not folder.is_dir():
        raise CheckpointError(f"offload takes host, disk or an existing folder; there is no folder {folder}.")
    return folder


def check(offload: Offload, device: torch.device) -> None:
    """Raises CapabilityError if a device cannot offload that way; the message says what it can do."""
    kind = "host" if isinstance(offload, str) else "disk"
    if offload is None or _OFFLOADS.get(device.type) == kind:
        return
    where = {"host": "a model on an NVIDIA GPU", "disk": "a model on the CPU"}[kind]
    able = f"offload to {_OFFLOADS[device.type]}" if device.type in _OFFLOADS else "leave the option out"
    raise CapabilityError(f"Offload to {kind} is for {where}, this one is on {device}: {able}.")


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
    if isinstance(offload, str):
        resident = _resident(offload)
        return HostStore(shape, slots, capacity, device, feature_layers, feature_size, resident=resident)
    return DiskStore(offload, shape, slots, capacity, transposed_keys, feature_layers, feature_size)


def _resident(option: str) -> int | None:
    """The number of layers that ``host:N`` keeps on the device; None for ``host``: as many as fit.

    Raises:
        RequestError: N is no whole number.
    """
    _, colon, count = option.partition(":")
    if colon and not count.isdecimal():
        raise RequestError(f"offload=host:N keeps N layers on the GPU, a whole number, got {option!r}")
    return int(count) if colon else None
