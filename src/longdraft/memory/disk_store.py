"""A KV store in a memory-mapped file, for contexts that exceed the memory of a machine without a GPU.

The system keeps as much of the file in memory as it has room for, and drops the rest.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch

from longdraft.errors import CheckpointError, MemoryBudgetError
from longdraft.memory import sizes
from longdraft.memory.store import KVShape, KVStore


class DiskStore(KVStore):
    """A :class:`KVStore` on the CPU with keys and values in an unnamed file, and features in memory.

    The file goes away with the store or the process, however that ends.

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
        self.folder = folder
        super().__init__(shape, slots, capacity, "cpu", transposed_keys, feature_layers, feature_size)

    def _allocate(self, transposed_keys: bool, beside: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.require(beside, self.device, f"{self._name}, offloaded to {self.folder},")
        total = self.bytes_for(self.shape, self.slots, self.capacity)
        rows = torch.frombuffer(self._mapped(total), dtype=self.shape.dtype)
        keys, values = rows.view(2, *self._size)
        return keys.view(*self._size[:3], -1, self.capacity).transpose(-1, -2) if transposed_keys else keys, values

    def _mapped(self, size: int) -> mmap.mmap:
        """Maps a new file, whose room is reserved: one that meets a full disk later kills the process."""
        try:
            if size <= (free := shutil.disk_usage(self.folder).free):
                with tempfile.TemporaryFile(prefix="longdraft-kv-", dir=self.folder) as file:
                    os.truncate(file.fileno(), size)
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(file.fileno(), 0, size)
                    return mmap.mmap(file.fileno(), size)  # keeps the file open
        except OSError as error:
            raise CheckpointError(
                f"No file for the KV cache can be made in {self.folder}: {error}. Name another folder to offload to."
            ) from error
        raise MemoryBudgetError(
            f"{self._name} needs {sizes.human(size)} ({size} bytes) on the disk of {self.folder}, and "
            f"{sizes.human(free)} ({free} bytes) are free. Name a folder on another disk to offload to, shorten the "
            "prompt, or lower the token budget or the batch."
        )
