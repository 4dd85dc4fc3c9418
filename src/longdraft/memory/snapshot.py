"""Snapshots: a prefilled slot on disk, as one safetensors file with keys, values and tokens, each with its CRC-32."""

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

# What the names of all versions of the format begin with.
_FAMILY = "longdraft-kv-"
FORMAT = f"{_FAMILY}3"
# Prefix of the tensors of layers that keep a state instead of rows.
_STATES = "states."
# Suffix of unfinished files (:func:`longdraft.files.atomic_write`).
PART_SUFFIX = ".part"


class DamagedSnapshotError(CheckpointError):
    """A snapshot of longdraft is damaged, or of another version: whoever wanted its rows computes them."""


class SnapshotHeader(NamedTuple):
    """A snapshot's tokens (int64 ids), its target's fingerprint, the layers of its hidden states, the kind of its rows,
    and checksums of its tensors."""

    tokens: array[int]
    target_fingerprint: str
    feature_layers: tuple[int, ...]
    rope_regime: str
    checksums: dict[str, int]


def save(
    store: KVStore, slot: int, tokens: Sequence[int], fingerprint: str, path: Path | str, rope_regime: str = ""
) -> None:
    """Writes the first committed rows of a slot, atomically; all of them if it has states.

    Args:
        tokens: the token ids of these rows.
        fingerprint: names the target; :func:`load` refuses any other.
        rope_regime: of the rows.

    Raises:
        CheckpointError: the file cannot be written (no space, no permission); nothing is left behind.
        MemoryBudgetError: the rows do not fit the free memory.
    """
    n, committed = len(tokens), store.lengths[slot]
    if n > committed or (store.states and n < committed):
        raise ValueError(f"{n} tokens for {committed} committed rows")
    memory_info.require_bytes(store.shape.bytes_per_token * n, torch.device("cpu"), f"A snapshot of {n} tokens")
    rows = store.read_entries(slot, 0, n)
    tensors = {"keys": rows.keys, "values": rows.values, "tokens": torch.tensor(list(tokens), **CPU_INT64)}
    meta = {"format": FORMAT, "target": fingerprint}
    if rope_regime:
        meta["kind"] = rope_regime
    if rows.features is not None:
        tensors["features"] = rows.features
        meta["feature_layers"] = ",".join(map(str, store.feature_layers))
    for number, states in enumerate(store.states):
        tensors |= {f"{_STATES}{number}.{name}": tensor for name, tensor in states.save(slot).items()}
    sums = {name: _checksum(tensor, _kind(tensor.dtype, tensor.shape)) for name, tensor in tensors.items()}
    meta |= {"checksums": json.dumps(sums), "checksum": str(_header_checksum(meta, sums))}
    with atomic_write(Path(path)) as part:
        save_file(tensors, part, metadata=meta)
        with part.open("r+b") as file:
            os.fsync(file.fileno())  # or a power cut could leave a file with a name and no rows


def load(store: KVStore, slot: int, fingerprint: str, path: Path | str, max_tokens: int | None = None) -> list[int]:
    """Restores a slot from a file of :func:`save` and returns the token ids that it now holds.

    A store with hidden states takes nothing from a file without them: the text has to be prefilled again.

    Args:
        max_tokens: number of leading rows to read; None for all.

    Raises:
        CheckpointError: the file is missing, is no snapshot, is another target's, or holds more rows than the slot.
        DamagedSnapshotError: what it holds is not what was written. The slot's own rows may be overwritten by then.
    """
    path = Path(path)
    with _opened(path) as (file, found):
        if found is None:
            raise CheckpointError(f"{path} is not a KV snapshot of longdraft. Delete it or name another file.")
        if found.target_fingerprint != fingerprint:
            raise CheckpointError(
                f"{path} was made with another target ({found.target_fingerprint}; this one is {fingerprint}). "
                "Delete it or name another file."
            )
        n = len(found.tokens)
        size = [store.shape.layers, store.shape.kv_heads, n, store.shape.head_dim]
        if any(list(file.get_slice(name).get_shape()) != size for name in ("keys", "values")):
            raise ValueError(f"its rows are not those of {n} tokens")
        end = n if max_tokens is None else min(max_tokens, n)
        if end > store.capacity:
            raise CheckpointError(f"{path} holds {end} tokens, the slot has room for {store.capacity}.")
        if store.features is not None and found.feature_layers != store.feature_layers:
            return []
        for number, states in enumerate(store.states):
            names = [name for name in found.checksums if name.startswith(f"{_STATES}{number}.")]
            tensors = {name.split(".", 2)[2]: _tensor(file, name, found.checksums) for name in names}
            states.load(slot, tensors, n)
        store.lengths[slot] = n
        end = store.restorable_length(slot, end)
        store.truncate(slot, end)
        _read_rows(store, slot, file, found, end)
    return found.tokens[:end].tolist()


def _read_rows(store: KVStore, slot: int, file: Any, head: SnapshotHeader, end: int) -> None:
    """Reads a file's rows, as far as row ``end``. Its whole tensors are checked."""
    if not end:
        return
    if store.features is not None:
        store.features[slot, :end] = _tensor(file, "features", head.checksums)[:end].to(store.device)
    sums: dict[str, int] = {}
    for layers in store.layer_groups:
        for name, kept in zip(("keys", "values"), store.slot_kv(slot, layers), strict=True):
            for place, layer in enumerate(range(*layers.indices(store.shape.layers))):
                rows = (whole := file.get_slice(name))[layer]
                sums[name] = _checksum(rows, sums.get(name, _kind(rows.dtype, whole.get_shape())))
                kept[place, :, :end] = rows[:, :end].to(kept.device)
    if any(sums[name] != head.checksums[name] for name in sums):
        raise ValueError("its keys and values are not those that were written")


def read_header(path: Path | str) -> SnapshotHeader | None:
    """Reads a snapshot's :class:`SnapshotHeader` without its keys and values; None if it is no snapshot of longdraft.

    Raises:
        CheckpointError: the file is damaged.
        OSError: it is missing or cannot be read.
    """
    if not os.access(path, os.R_OK):
        raise OSError("it is missing, or may not be read")
    with _opened(Path(path)) as (_, found):
        return found


def try_read_header(path: Path | str) -> SnapshotHeader | None:
    """A snapshot's :class:`SnapshotHeader`; None if the file cannot be read as one."""
    try:
        return read_header(path)
    except (OSError, MemoryBudgetError):
        return None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, SnapshotHeader | None]]:
    """A snapshot's file and head; no head if it is none of longdraft. What cannot be read inside is damaged.

    Raises:
        CheckpointError: it cannot be read. DamagedSnapshotError: it is longdraft's.
    """
    failure, remedy = f"Could not read the snapshot {path}", "It is damaged: delete it and run again."
    with file_errors(path, failure), require_regular(path).open("rb") as beginning:
        kind = DamagedSnapshotError if _FAMILY.encode() in beginning.read(1 << 16) else CheckpointError
    with file_errors(path, failure, remedy, kind), safe_open(path, framework="pt") as file:
        meta = file.metadata() or {}
        yield file, _head(file, meta) if str(meta.get("format")).startswith(_FAMILY) else None


def _head(file: Any, meta: dict[str, str]) -> SnapshotHeader:
    """Raises what it likes if a header was not written by :func:`save`."""
    if meta["format"] != FORMAT:
        raise ValueError("it is of another version of longdraft")
    sums = {str(name): int(number) for name, number in json.loads(meta.pop("checksums")).items()}
    if int(meta.pop("checksum")) != _header_checksum(meta, sums) or set(sums) != set(file.keys()):
        raise ValueError("its header is not what was written")
    tokens = array("q", _tensor(file, "tokens", sums).tolist())
    layers = tuple(int(n) for n in meta.get("feature_layers", "").split(",") if n)
    return SnapshotHeader(tokens, meta["target"], layers, meta.get("kind", ""), sums)


def _tensor(file: Any, name: str, checksums: Mapping[str, int]) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name)
    if _checksum(tensor, _kind(tensor.dtype, tensor.shape)) != checksums[name]:
        raise ValueError(f"its {name} are not what was written")
    return tensor


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The beginning of a tensor's checksum: the same bytes say something else as another dtype or shape."""
    return zlib.crc32(f"{dtype} {[*shape]}".encode())


def _checksum(tensor: torch.Tensor, before: int) -> int:
    """The CRC-32 of a tensor's bytes, going on from that of its kind or of other rows: about a second a GB."""
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, before)


def _header_checksum(meta: Mapping[str, str], checksums: Mapping[str, int]) -> int:
    return zlib.crc32(json.dumps([sorted(meta.items()), sorted(checksums.items())]).encode())
