"""Offload: where keys and values are kept when not in the memory of the device that computes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from longdraft.errors import CapabilityError, CheckpointError, RequestError
from longdraft.memory.disk_store import DiskStore, default_folder
from longdraft.memory.host_store import HostStore
from longdraft.memory.store import KVShape, KVStore

# None: nothing is offloaded. "host": host memory, for a GPU. A folder: a file in it, for a CPU.
Offload = Literal["host"] | Path | None

# What a device can offload to. A CPU's KV is in host memory as it is.
_OFFLOADS = {"cuda": "host", "cpu": "disk"}


def parse(asked: str | Path | None) -> Offload:
    """What a user wrote: None, ``"host"``, ``"disk"`` (the folder for temporary files), or a folder.

    Raises:
        CheckpointError: there is no such folder.
        RequestError: it is no name.
    """
    if asked is None or asked == "host":
        return asked  # type: ignore[return-value]  # the literal, but for mypy a str
    if not isinstance(asked, str | Path):
        raise RequestError(f"offload takes host, disk or an existing folder, got {asked!r}")
    folder = default_folder() if asked == "disk" else Path(asked)
    if not folder.is_dir():
        raise CheckpointError(f"offload takes host, disk or an existing folder; there is no folder {folder}.")
    return folder


def check(offload: Offload, device: torch.device) -> None:
    """Refuses what a device cannot do.

    Raises:
        CapabilityError: saying what it can.
    """
    kind = "host" if offload == "host" else "disk"
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
) -> KVStore:
    """A :class:`KVStore`, or one that keeps its rows elsewhere and is used in the same way."""
    if offload is None:
        return KVStore(shape, slots, capacity, device, transposed_keys, feature_layers, feature_size)
    if offload == "host":
        return HostStore(shape, slots, capacity, device, feature_layers, feature_size)
    assert isinstance(offload, Path)
    return DiskStore(offload, shape, slots, capacity, transposed_keys, feature_layers, feature_size)
