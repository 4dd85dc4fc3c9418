"""Snapshots: a safetensors file of a slot's keys, values, features, states and tokens, with CRC-32 checksums."""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from longdraft.errors import CheckpointError, MemoryBudgetError
from longdraft.files import atomic_write, file_errors, require_regular
from longdraft.memory import memory_info
from longdraft.memory.store import KVStore
from longdraft.native.boundary import CPU_INT64

# The name of each version of the format begins so.
_FORMAT_PREFIX = "longdraft-kv-"
FORMAT = f"{_FORMAT_PREFIX}3"
# Names of tensors of layers without full KV (windows, recurrent layers) begin so.
_STATES_PREFIX = "states."
# Suffix of unfinished files (:func:`longdraft.files.atomic_write`).
PART_SUFFIX = ".part"


class DamagedSnapshotError(CheckpointError):
    """A snapshot is damaged, or has another format version. The caller prefills the prompt instead."""


class SnapshotHeader(NamedTuple):
    """The description of a snapshot's keys, values, features and states.

    Attributes:
        tokens: the token ids, int64.
        feature_layers: layers whose hidden states are stored; empty: none.
        rope_regime: RoPE regime of the KV.
        checksums: name of each tensor -> its checksum.
    """

    tokens: array[int]
    target_fingerprint: str
    feature_layers: tuple[int, ...]
    rope_regime: str
    checksums: dict[str, int]


def save(
    store: KVStore, slot: int, tokens: Sequence[int], fingerprint: str, path: Path | str, rope_regime: str = ""
) -> None:
    """Writes the first committed tokens of a slot to a file, atomically.

    Args:
        tokens: the ids of these tokens. If the store has states, they must be all committed tokens.
        fingerprint: identifies the target; :func:`load` refuses any other.
        rope_regime: RoPE regime of the KV.

    Raises:
        CheckpointError: the file cannot be written (no space, no permission).
        MemoryBudgetError: the copy does not fit the free memory.
    """
    n, committed = len(tokens), store.lengths[slot]
    if n > committed or (store.states and n < committed):
        raise ValueError(f"{n} tokens for {committed} committed entries")
    memory_info.require_bytes(store.shape.bytes_per_token * n, torch.device("cpu"), f"A snapshot of {n} tokens")
    kv = store.read_entries(slot, 0, n)
    tensors = {"keys": kv.keys, "values": kv.values, "tokens": torch.tensor(list(tokens), **CPU_INT64)}
    meta = {"format": FORMAT, "target": fingerprint} | ({"kind": rope_regime} if rope_regime else {})
    if kv.features is not None:
        tensors["features"] = kv.features
        meta["feature_layers"] = ",".join(map(str, store.feature_layers))
    for number, states in enumerate(store.states):
        tensors |= {f"{_STATES_PREFIX}{number}.{name}": tensor for name, tensor in states.save(slot).items()}
    sums = {name: _checksum(tensor, _checksum_seed(tensor.dtype, tensor.shape)) for name, tensor in tensors.items()}
    meta |= {"checksums": json.dumps(sums), "checksum": str(_header_checksum(meta, sums))}
    with atomic_write(Path(path)) as part:
        save_file(tensors, part, metadata=meta)
        with part.open("r+b") as file:
            os.fsync(file.fileno())  # or a power cut could leave a file with a name and no contents


def load(store: KVStore, slot: int, fingerprint: str, path: Path | str, max_tokens: int | None = None) -> list[int]:
    """Restores a slot from a file of :func:`save`, and returns the token ids that the slot then holds.

    A store with features reads nothing from a file without them: the prompt has to be prefilled again.

    Args:
        max_tokens: number of leading tokens to read; None for all.

    Raises:
        CheckpointError: the file is missing, is no snapshot, is another target's, or holds more tokens than the slot.
        DamagedSnapshotError: its contents have changed since they were written. The slot may be overwritten in part.
    """
    path = Path(path)
    with _open(path) as (file, header):
        if header is None:
            raise CheckpointError(f"{path} is not a KV snapshot of longdraft. Delete it or name another file.")
        if header.target_fingerprint != fingerprint:
            raise CheckpointError(
                f"{path} was made with another target ({header.target_fingerprint}; this one is {fingerprint}). "
                "Delete it or name another file."
            )
        n = len(header.tokens)
        size = [store.shape.layers, store.shape.kv_heads, n, store.shape.head_dim]
        if any(list(file.get_slice(name).get_shape()) != size for name in ("keys", "values")):
            raise ValueError(f"its keys and values are not those of {n} tokens")
        end = n if max_tokens is None else min(max_tokens, n)
        if end > store.capacity:
            raise CheckpointError(f"{path} holds {end} tokens, the slot at most {store.capacity}.")
        if store.features is not None and header.feature_layers != store.feature_layers:
            return []
        for number, states in enumerate(store.states):
            names = [name for name in header.checksums if name.startswith(f"{_STATES_PREFIX}{number}.")]
            tensors = {name.split(".", 2)[2]: _tensor(file, name, header.checksums) for name in names}
            states.load(slot, tensors, n)
        store.lengths[slot] = n
        end = store.restorable_length(slot, end)
        store.truncate(slot, end)
        _read_kv(store, slot, file, header, end)
    return header.tokens[:end].tolist()


def _read_kv(store: KVStore, slot: int, file: Any, header: SnapshotHeader, end: int) -> None:
    """Reads a file's first ``end`` entries, and verifies the checksums of its full tensors."""
    if not end:
        return
    if store.features is not None:
        store.features[slot, :end] = _tensor(file, "features", header.checksums)[:end].to(store.device)
    sums: dict[str, int] = {}
    for layers in store.layer_groups:
        for name, target in zip(("keys", "values"), store.slot_kv(slot, layers), strict=True):
            for i, layer in enumerate(range(*layers.indices(store.shape.layers))):
                entries = (tensor := file.get_slice(name))[layer]
                sums[name] = _checksum(entries, sums.get(name, _checksum_seed(entries.dtype, tensor.get_shape())))
                target[i, :, :end] = entries[:, :end].to(target.device)
    if any(sums[name] != header.checksums[name] for name in sums):
        raise ValueError("its keys and values are not what was written")


def read_header(path: Path | str) -> SnapshotHeader | None:
    """Reads a snapshot's :class:`SnapshotHeader` without its keys and values; None if it is no snapshot of longdraft.

    Raises:
        CheckpointError: the file is damaged.
        OSError: the file is missing or unreadable.
    """
    if not os.access(path, os.R_OK):
        raise OSError("it is missing, or may not be read")
    with _open(Path(path)) as (_, header):
        return header


def try_read_header(path: Path | str) -> SnapshotHeader | None:
    """Reads a snapshot's :class:`SnapshotHeader`; None if it cannot be read."""
    try:
        return read_header(path)
    except (OSError, MemoryBudgetError):
        return None


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, SnapshotHeader | None]]:
    """Opens a snapshot: yields the file, and its header or None if longdraft did not write it.

    Raises:
        DamagedSnapshotError: a file of longdraft (its first bytes name the format) cannot be read, here or later.
        CheckpointError: any other file cannot be read.
    """
    failure, remedy = f"Could not read the snapshot {path}", "It is damaged: delete it and run again."
    with file_errors(path, failure), require_regular(path).open("rb") as start:
        error_class = DamagedSnapshotError if _FORMAT_PREFIX.encode() in start.read(1 << 16) else CheckpointError
    with file_errors(path, failure, remedy, error_class), safe_open(path, framework="pt") as file:
        meta = file.metadata() or {}
        yield file, _read_header(file, meta) if str(meta.get("format")).startswith(_FORMAT_PREFIX) else None


def _read_header(file: Any, meta: dict[str, str]) -> SnapshotHeader:
    """Parses a header. Raises errors of any type if :func:`save` did not write it."""
    if meta["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT}, the one of this version of longdraft")
    sums = {str(name): int(number) for name, number in json.loads(meta.pop("checksums")).items()}
    if int(meta.pop("checksum")) != _header_checksum(meta, sums) or set(sums) != set(file.keys()):
        raise ValueError("its header is not what was written")
    tokens = array("q", _tensor(file, "tokens", sums).tolist())
    layers = tuple(int(n) for n in meta.get("feature_layers", "").split(",") if n)
    return SnapshotHeader(tokens, meta["target"], layers, meta.get("kind", ""), sums)


def _tensor(file: Any, name: str, checksums: Mapping[str, int]) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name)
    if _checksum(tensor, _checksum_seed(tensor.dtype, tensor.shape)) != checksums[name]:
        raise ValueError(f"its {name} are not what was written")
    return tensor


def _checksum_seed(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The initial value of a tensor's checksum. It covers dtype and shape, which the tensor's bytes do not tell."""
    return zlib.crc32(f"{dtype} {[*shape]}".encode())


def _checksum(tensor: torch.Tensor, initial: int) -> int:
    """The CRC-32 of a tensor's bytes, continued from its seed or from earlier layers. A GB takes about a second."""
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, initial)


def _header_checksum(meta: Mapping[str, str], checksums: Mapping[str, int]) -> int:
    return zlib.crc32(json.dumps([sorted(meta.items()), sorted(checksums.items())]).encode())
