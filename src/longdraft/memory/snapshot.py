"""A prefilled slot on disk: one safetensors file with the keys, the values and the tokens they belong to."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longdraft.errors import CheckpointError
from longdraft.memory import sizes
from longdraft.memory.store import KVStore

FORMAT = "longdraft-kv-1"
# How the names of files end that are being written.
PART = ".part"


class Head(NamedTuple):
    """What a snapshot says of itself.

    Attributes:
        tokens: int64 ids, one a row.
        target: fingerprint. feature_layers: whose hidden states lie beside the KV.
    """

    tokens: array[int]
    target: str
    feature_layers: tuple[int, ...]


def save(store: KVStore, slot: int, tokens: Sequence[int], fingerprint: str, path: Path | str) -> None:
    """Writes the committed rows of a slot, atomically.

    Args:
        tokens: the token ids whose KV the slot holds, one a committed row.
        fingerprint: names the target; :func:`load` refuses any other.

    Raises:
        CheckpointError: when the file cannot be written (no space, no permission); nothing is left behind.
        MemoryBudgetError: when the rows do not fit the memory that is free.
    """
    path = Path(path)
    n = store.lengths[slot]
    if len(tokens) != n:
        raise ValueError(f"{len(tokens)} tokens for {n} committed rows")
    keys, values = _gathered(store, slot, n)
    tensors = {"keys": keys, "values": values, "tokens": torch.tensor(list(tokens), dtype=torch.int64)}
    meta = {"format": FORMAT, "target": fingerprint}
    if store.features is not None:
        tensors["features"] = store.features[slot, :n].contiguous()
        meta["feature_layers"] = ",".join(map(str, store.feature_layers))
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=PART)
        os.close(handle)
        temporary = Path(name)
        save_file(tensors, temporary, metadata=meta)
        with temporary.open("r+b") as written:
            os.fsync(written.fileno())  # or a power cut could leave a file with a name and no rows
        temporary.replace(path)
        temporary = None
    except (OSError, SafetensorError) as error:
        needed = sum(t.numel() * t.itemsize for t in tensors.values())
        raise CheckpointError(f"Could not write the snapshot {path} ({needed} bytes): {error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def load(store: KVStore, slot: int, fingerprint: str, path: Path | str, most: int | None = None) -> list[int]:
    """Restores a slot from a file of :func:`save` and returns the token ids that it now holds.

    A store that keeps hidden states takes nothing from a file that lacks them: its text has to be read again.

    Args:
        most: read so many leading rows; None: all.

    Raises:
        CheckpointError: missing, truncated or damaged file, another target's snapshot, or more rows than the slot has
            room for. The slot's own rows may be overwritten by then: forget them.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            if meta.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a KV snapshot of longdraft. Delete it or name another file.")
            if meta.get("target") != fingerprint:
                raise CheckpointError(
                    f"{path} was made with another target ({meta.get('target')}; this one is {fingerprint}). "
                    "Delete it or name another file."
                )
            tokens = file.get_tensor("tokens").tolist()
            size = [store.shape.layers, store.shape.kv_heads, len(tokens), store.shape.head_dim]
            if any(list(file.get_slice(name).get_shape()) != size for name in ("keys", "values")):
                raise CheckpointError(f"{path} is damaged: its rows are not those of {len(tokens)} tokens. Delete it.")
            tokens = tokens[:most]
            if len(tokens) > store.capacity:
                raise CheckpointError(f"{path} holds {len(tokens)} tokens, the slot has room for {store.capacity}.")
            if store.features is not None:
                if meta.get("feature_layers") != ",".join(map(str, store.feature_layers)):
                    return []
                store.features[slot, : len(tokens)] = file.get_slice("features")[: len(tokens)].to(store.device)
            for layers in store.portions:
                for name, rows in zip(("keys", "values"), store.stored(slot, layers), strict=True):
                    rows[:, :, : len(tokens)] = file.get_slice(name)[layers, :, : len(tokens)].to(rows.device)
    except (OSError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"Could not read the snapshot {path}: {error}. Delete it and run again.") from error
    store.lengths[slot] = len(tokens)
    return [int(t) for t in tokens]


def _gathered(store: KVStore, slot: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (layers, kv_heads, n, head_dim) of a slot's first rows, contiguous.

    Raises:
        MemoryBudgetError: when a store off the device holds more than fits the memory: a file is put together there.
    """
    shape = store.shape
    sizes.require(shape.bytes_per_token * n, torch.device("cpu"), f"A snapshot of {n} tokens")
    out = [torch.empty(shape.layers, shape.kv_heads, n, shape.head_dim, dtype=shape.dtype) for _ in "kv"]
    for layers in store.portions:
        for tensor, rows in zip(out, store.stored(slot, layers), strict=True):
            tensor[layers] = rows[:, :, :n].to(shape.dtype)
    return out[0], out[1]


def head(path: Path | str) -> Head | None:
    """What a file says of itself, without reading keys and values; None: it is no snapshot of longdraft.

    Raises:
        CheckpointError: it is damaged. OSError: it is missing, or may not be read.
    """
    try:
        with safe_open(Path(path), framework="pt") as file:
            meta = file.metadata() or {}
            if meta.get("format") != FORMAT:
                return None
            layers = tuple(int(n) for n in meta.get("feature_layers", "").split(",") if n)
            return Head(array("q", file.get_tensor("tokens").tolist()), meta.get("target", ""), layers)
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"The snapshot {path} is damaged: {error}.") from error


def token_count(path: Path | str) -> int:
    """How many tokens a snapshot holds, without reading the rest of it; 0 when it cannot be read."""
    try:
        with safe_open(Path(path), framework="pt") as file:
            return int(file.get_slice("tokens").get_shape()[0])
    except (OSError, SafetensorError):
        return 0


def serves(path: Path | str, feature_layers: Sequence[int] = ()) -> bool:
    """Whether there is a snapshot that holds these hidden states too, without reading the rest of it."""
    try:
        with safe_open(Path(path), framework="pt") as file:
            found = (file.metadata() or {}).get("feature_layers")
    except (OSError, SafetensorError):
        return False
    return not feature_layers or found == ",".join(map(str, feature_layers))
