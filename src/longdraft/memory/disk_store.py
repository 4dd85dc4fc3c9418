"""A KV store in a memory-mapped file, for contexts that exceed the memory of a machine without a GPU.

The system keeps as much of the file in memory as it has room for, and drops the rest.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch

from longdraft.errors import CheckpointError, MemoryBudgetError
from longdraft.memory import sizes
from longdraft.memory.store import KVShape, KVStore

# File systems that keep files in memory.
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# Errors of file systems that cannot reserve room; any other error means that the disk is full.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class DiskStore(KVStore):
    """A :class:`KVStore` on the CPU that keeps keys and values in a file, and features in memory.

    On Linux and macOS the file has no name, so it goes away with the store or the process, however that ends.

    Args:
        folder: where the file is made; the others as for :class:`KVStore`.

    Raises:
        CheckpointError: no file can be made in the folder.
        MemoryBudgetError: the disk has no room for the file.
    """

    def __init__(
        self,
        folder: Path,
        shape: KVShape,
        slots: int,
        capacity: int,
        transposed_keys: bool = False,
        feature_layers: tuple[int, ...] = (),
        feature_size: int = 0,
    ) -> None:
        self._folder = folder
        super().__init__(shape, slots, capacity, "cpu", transposed_keys, feature_layers, feature_size)

    def _allocate(self, transposed_keys: bool, beside: int) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.bytes_for(self.shape, self.slots, self.capacity)
        resident = beside + (total if in_memory(self._folder) else 0)
        sizes.require(resident, self.device, f"{self._name}, offloaded to {self._folder},")
        rows = torch.frombuffer(_mapped(self._folder, total, self._name), dtype=self.shape.dtype)
        keys, values = rows.view(2, *self._size)
        return keys.view(*self._size[:3], -1, self.capacity).transpose(-1, -2) if transposed_keys else keys, values


def default_folder() -> Path:
    """The folder for temporary files, or /var/tmp if that folder is kept in memory."""
    folder, on_disk = Path(tempfile.gettempdir()), Path("/var/tmp")
    return on_disk if in_memory(folder) and on_disk.is_dir() and not in_memory(on_disk) else folder


def in_memory(folder: Path) -> bool:
    """True if files in a folder take memory (tmpfs); False if the system does not say."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    folder = folder.resolve()
    # The longest mount point above the folder counts; of several there, the last.
    kinds = [(len(point), kind) for _, point, kind, *_ in mounts if folder.is_relative_to(point)]
    return bool(kinds) and max(reversed(kinds), key=lambda mount: mount[0])[1] in _IN_MEMORY


def _mapped(folder: Path, size: int, what: str) -> mmap.mmap:
    """Maps a new file of ``size`` bytes without a name. Raises the errors of :class:`DiskStore`."""
    try:
        free = shutil.disk_usage(folder).free
        if size > free:
            raise _no_room(folder, size, what, free)
        with tempfile.TemporaryFile(prefix="longdraft-kv-", dir=folder) as file:
            _reserve(file.fileno(), size)
            return mmap.mmap(file.fileno(), size)  # keeps the file open
    except OSError as error:
        if isinstance(error, MemoryBudgetError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _no_room(folder, size, what, shutil.disk_usage(folder).free) from error
        raise CheckpointError(
            f"No file for the KV cache can be made in {folder}: {error}. Name another folder to offload to."
        ) from error


def _reserve(descriptor: int, size: int) -> None:
    """Reserves the room now: a mapped file that meets a full disk later kills the process."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    os.truncate(descriptor, size)


def _no_room(folder: Path, size: int, what: str, free: int) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"{what} needs {sizes.human(size)} ({size} bytes) on the disk of {folder}, and {sizes.human(free)} "
        f"({free} bytes) are free. Name a folder on another disk to offload to, shorten the prompt, or lower the "
        "token budget or the batch."
    )
