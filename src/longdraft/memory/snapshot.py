"""A snapshot is a safetensors file of a slot's keys, values, features, states and tokens, with CRC-32 checksums.

A ValueError in this module begins with "its": :func:`longdraft.files.file_errors` puts the file's name before it.
"""

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
from longdraft.memory.kv_tensors import as_tensor
from longdraft.memory.store import KVStore
from longdraft.native.boundary import CPU_INT64

# All versions of the format begin with this prefix.
_FORMAT_PREFIX = "longdraft-kv-"
FORMAT = f"{_FORMAT_PREFIX}3"
# Prefix of the tensor names of layers without KV of the full context (windows, recurrent layers).
_STATES_PREFIX = "states."
# Suffix of unfinished files (:func:`longdraft.files.atomic_write`).
PART_SUFFIX = ".part"


class DamagedSnapshotError(CheckpointError):
    """A snapshot is damaged, or has another format version. The caller prefills the prompt instead."""


class SnapshotHeader(NamedTuple):
    """Describes the content of a snapshot.

    Attributes:
        tokens: the token ids, int64.
        target_fingerprint: identifies the target that computed the KV.
        feature_layers: layers whose hidden states are stored; may be empty.
        rope_regime: RoPE regime of the KV (``TargetRunner.rope_regime``).
        checksums: name of a tensor -> checksum of the tensor.
        checkpoint_lengths: numbers of tokens after which the file has states of recurrent layers; may be empty.
    """

    tokens: array[int]
    target_fingerprint: str
    feature_layers: tuple[int, ...]
    rope_regime: str
    checksums: dict[str, int]
    checkpoint_lengths: frozenset[int]


def save(
    store: KVStore, slot: int, tokens: Sequence[int], fingerprint: str, path: Path | str, rope_regime: str = ""
) -> None:
    """Writes the KV of a slot's first tokens to a file, atomically.

    ``tokens`` are the ids of the tokens: all committed tokens if the store has states. ``fingerprint`` identifies the
    target, because :func:`load` refuses the KV of another target. ``rope_regime`` is the RoPE regime of the KV.

    Raises:
        CheckpointError: the file cannot be written (no space, no permission).
        MemoryBudgetError: the copy does not fit the free memory.
    """
    n, committed = len(tokens), store.lengths[slot]
    if n > committed or (store.states and n < committed):
        raise ValueError(f"{n} tokens for {committed} committed entries")
    memory_info.require_bytes(store.bytes_per_token * n, torch.device("cpu"), f"A snapshot of {n} tokens")
    kv = store.read_entries(slot, 0, n)
    tensors = {"keys": kv.keys, "values": kv.values, "tokens": torch.tensor(list(tokens), **CPU_INT64)}
    metadata = {"format": FORMAT, "target": fingerprint} | ({"kind": rope_regime} if rope_regime else {})
    if kv.features is not None:
        tensors["features"] = kv.features
        metadata["feature_layers"] = ",".join(map(str, store.feature_layers))
    for i, states in enumerate(store.states):
        tensors |= {f"{_STATES_PREFIX}{i}.{name}": tensor for name, tensor in states.save(slot).items()}
    checksums = {name: _checksum(x, _checksum_seed(x.dtype, x.shape)) for name, x in tensors.items()}
    metadata |= {"checksums": json.dumps(checksums), "checksum": str(_header_checksum(metadata, checksums))}
    with atomic_write(Path(path)) as unfinished_path:
        save_file(tensors, unfinished_path, metadata=metadata)
        with unfinished_path.open("r+b") as file:
            os.fsync(file.fileno())  # without it, a power cut could leave an empty file


def load(store: KVStore, slot: int, fingerprint: str, path: Path | str, max_tokens: int | None = None) -> list[int]:
    """Restores a slot from a file of :func:`save`, and returns the token ids whose KV the slot then has.

    ``max_tokens`` is the maximum number of tokens to restore; None: all. If the store needs features that the file does
    not have, nothing is restored: the prompt has to be prefilled again.

    Raises:
        CheckpointError: the file is missing, is no snapshot, belongs to another target, or does not fit the slot.
        DamagedSnapshotError: the file has changed since it was written. The slot may be partly overwritten.
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
        num_tokens = len(header.tokens)
        for name, stored in zip(("keys", "values"), store.slot_kv(slot, store.layer_groups[0]), strict=True):
            outer = [store.shape.layers, store.shape.kv_heads, num_tokens]
            # Quantized entries are bytes. Older versions saved them as floats.
            entry_sizes = as_tensor(stored[:, :, :0]).shape[-1], store.shape.head_dim
            if list(file.get_slice(name).get_shape()) not in [[*outer, size] for size in entry_sizes]:
                raise ValueError(f"its {name} are not those of {num_tokens} tokens")
        length = num_tokens if max_tokens is None else min(max_tokens, num_tokens)
        if length > store.capacity:
            raise CheckpointError(f"{path} holds {length} tokens, the slot at most {store.capacity}.")
        if store.features is not None and header.feature_layers != store.feature_layers:
            return []
        for i, states in enumerate(store.states):
            names = [name for name in header.checksums if name.startswith(f"{_STATES_PREFIX}{i}.")]
            tensors = {name.split(".", 2)[2]: _read_tensor(file, name, header.checksums) for name in names}
            states.load(slot, tensors, num_tokens)
        store.lengths[slot] = num_tokens
        length = store.restorable_length(slot, length)
        store.truncate(slot, length)
        _read_kv(store, slot, file, header, length)
    return header.tokens[:length].tolist()


def _read_kv(store: KVStore, slot: int, file: Any, header: SnapshotHeader, length: int) -> None:
    """Reads a file's first ``length`` entries into a slot, and verifies the checksums of all entries."""
    if not length:
        return
    if store.features is not None:
        store.features[slot, :length] = _read_tensor(file, "features", header.checksums)[:length].to(store.device)
    checksums: dict[str, int] = {}
    for layers in store.layer_groups:
        for name, target in zip(("keys", "values"), store.slot_kv(slot, layers), strict=True):
            for i, layer in enumerate(range(*layers.indices(store.shape.layers))):
                entries = (tensor := file.get_slice(name))[layer]
                initial = checksums.get(name, _checksum_seed(entries.dtype, tensor.get_shape()))
                checksums[name] = _checksum(entries, initial)
                target[i, :, :length] = entries[:, :length].to(target.device)
    if any(checksums[name] != header.checksums[name] for name in checksums):
        raise ValueError("its keys and values are not what was written")


def read_header(path: Path | str) -> SnapshotHeader | None:
    """Reads a snapshot's header without the keys and values. Returns None if the file is no snapshot of longdraft.

    Raises:
        CheckpointError: the file is damaged.
        OSError: the file is missing or unreadable.
    """
    if not os.access(path, os.R_OK):
        raise OSError("it is missing, or may not be read")
    with _open(Path(path)) as (_, header):
        return header


def try_read_header(path: Path | str) -> SnapshotHeader | None:
    """Reads a snapshot's header. Returns None if the file cannot be read."""
    try:
        return read_header(path)
    except (OSError, MemoryBudgetError):
        return None


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, SnapshotHeader | None]]:
    """Opens a snapshot. Yields the file and the header; the header is None if longdraft did not write the file.

    Raises:
        DamagedSnapshotError: a file of longdraft, whose first bytes name the format, cannot be read here or later.
        CheckpointError: any other file cannot be read.
    """
    failure, remedy = f"Could not read the snapshot {path}", "It is damaged: delete it and run again."
    with file_errors(path, failure), require_regular(path).open("rb") as raw_file:
        error_class = DamagedSnapshotError if _FORMAT_PREFIX.encode() in raw_file.read(1 << 16) else CheckpointError
    with file_errors(path, failure, remedy, error_class), safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        yield file, _parse_header(file, metadata) if str(metadata.get("format")).startswith(_FORMAT_PREFIX) else None


def _parse_header(file: Any, metadata: dict[str, str]) -> SnapshotHeader:
    """Parses the metadata of a file. May raise any error if :func:`save` did not write the metadata."""
    if metadata["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT}, the one of this version of longdraft")
    checksums = {str(name): int(number) for name, number in json.loads(metadata.pop("checksums")).items()}
    if int(metadata.pop("checksum")) != _header_checksum(metadata, checksums) or set(checksums) != set(file.keys()):
        raise ValueError("its header is not what was written")
    tokens = array("q", _read_tensor(file, "tokens", checksums).tolist())
    feature_layers = tuple(int(n) for n in metadata.get("feature_layers", "").split(",") if n)
    keys = {name.split(".")[2] for name in checksums if name.startswith(_STATES_PREFIX)}
    lengths = frozenset(len(tokens) if key == "now" else int(key) for key in keys if key == "now" or key.isdecimal())
    return SnapshotHeader(tokens, metadata["target"], feature_layers, metadata.get("kind", ""), checksums, lengths)


def _read_tensor(file: Any, name: str, checksums: Mapping[str, int]) -> torch.Tensor:
    """Reads a tensor; raises ValueError if the checksum differs."""
    tensor: torch.Tensor = file.get_tensor(name)
    if _checksum(tensor, _checksum_seed(tensor.dtype, tensor.shape)) != checksums[name]:
        raise ValueError(f"its {name} are not what was written")
    return tensor


def _checksum_seed(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Returns the initial value of a tensor's checksum: the CRC-32 of dtype and shape, which are not in the bytes."""
    return zlib.crc32(f"{dtype} {[*shape]}".encode())


def _checksum(tensor: torch.Tensor, initial: int) -> int:
    """Continues the CRC-32 ``initial`` with the bytes of a tensor. A GB takes about a second."""
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, initial)


def _header_checksum(metadata: Mapping[str, str], checksums: Mapping[str, int]) -> int:
    return zlib.crc32(json.dumps([sorted(metadata.items()), sorted(checksums.items())]).encode())
