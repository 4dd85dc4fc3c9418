"""Snapshots: a prefilled slot on disk, as one safetensors file with keys, values and tokens."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longdraft.errors import CheckpointError
from longdraft.memory import sizes
from longdraft.memory.store import KVStore

FORMAT = "longdraft-kv-1"
# Prefix of the tensors of layers that keep a state instead of rows.
_STATES = "states."
# Names the first row whose features are there; all, if it is missing.
_FIRST = "features_from"
# Suffix of unfinished files.
PART = ".part"


class Head(NamedTuple):
    """A snapshot's tokens (int64 ids), its target's fingerprint, the layers of its hidden states, the kind of its rows,
    and the name of the file that has the first of them; empty if it has all rows itself."""

    tokens: array[int]
    target: str
    feature_layers: tuple[int, ...]
    kind: str
    parent: str


def save(
    store: KVStore,
    slot: int,
    tokens: Sequence[int],
    fingerprint: str,
    path: Path | str,
    kind: str = "",
    start: int = 0,
    parent: str = "",
) -> None:
    """Writes the committed rows of a slot, atomically.

    Args:
        tokens: the token ids of the committed rows.
        fingerprint: names the target; :func:`load` refuses any other.
        kind: of the rows, which :func:`rows_kind` returns.
        start: the first row that is written; ``parent``, a file of the same folder, has those before. Not for a store
            with states.

    Raises:
        CheckpointError: the file cannot be written (no space, no permission); nothing is left behind.
        MemoryBudgetError: the rows do not fit the free memory.
    """
    path = Path(path)
    n = store.lengths[slot]
    if len(tokens) != n:
        raise ValueError(f"{len(tokens)} tokens for {n} committed rows")
    keys, values = _gathered(store, slot, start, n)
    tensors = {"keys": keys, "values": values, "tokens": torch.tensor(list(tokens), dtype=torch.int64, device="cpu")}
    meta = {"format": FORMAT, "target": fingerprint}
    if kind:
        meta["kind"] = kind
    if start:
        meta |= {"start": str(start), "parent": parent}
    if store.features is not None:
        first = max(start, store.features.first(slot))
        tensors["features"] = store.features.read(slot, first, n).contiguous()
        meta |= {"feature_layers": ",".join(map(str, store.feature_layers)), _FIRST: str(first)}
    for number, states in enumerate(store.states):
        tensors |= {f"{_STATES}{number}.{name}": tensor for name, tensor in states.save(slot).items()}
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=PART)
        os.close(handle)
        temporary = Path(name)
        save_file(tensors, temporary, metadata=meta)
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # or a power cut could leave a file with a name and no rows
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        needed = sum(t.numel() * t.itemsize for t in tensors.values())
        raise CheckpointError(f"Could not write the snapshot {path} ({needed} bytes): {error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def load(store: KVStore, slot: int, fingerprint: str, path: Path | str, most: int | None = None) -> list[int]:
    """Restores a slot from a file of :func:`save` and returns the token ids that it now holds.

    A store with hidden states takes nothing from a file without them: the text has to be prefilled again.

    Args:
        most: number of leading rows to read; None for all.

    Raises:
        CheckpointError: the file is missing, truncated or damaged, is another target's, or holds more rows than the
            slot. The slot's own rows may be overwritten by then.
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
            start = int(meta.get("start", 0))
            size = [store.shape.layers, store.shape.kv_heads, len(tokens) - start, store.shape.head_dim]
            if any(list(file.get_slice(name).get_shape()) != size for name in ("keys", "values")):
                raise CheckpointError(f"{path} is damaged: its rows are not those of {len(tokens)} tokens. Delete it.")
            tokens = tokens[: _restored(store, slot, file, len(tokens), most)]
            if len(tokens) > store.capacity:
                raise CheckpointError(f"{path} holds {len(tokens)} tokens, the slot has room for {store.capacity}.")
            layers_kept = ",".join(map(str, store.feature_layers))
            if store.features is not None and meta.get("feature_layers") != layers_kept:
                return []
            before, end = tokens[:start], len(tokens)
            if before and load(store, slot, fingerprint, path.with_name(meta["parent"]), len(before)) != before:
                raise CheckpointError(f"{path} goes on from a file that has another text. Delete it.")
            own = max(0, end - start)
            if store.features is not None and (own or not start):
                first = int(meta.get(_FIRST, 0))
                begin = min(end, max(first, end - store.features.size))
                rows = file.get_slice("features")[max(0, begin - first) : max(0, end - first)].to(store.device)
                goes_on = 0 < start == first  # behind those that the other file has
                (store.features.write if goes_on else store.features.put)(slot, begin, rows)
            for layers in store.portions:
                for name, rows in zip(("keys", "values"), store.stored(slot, layers, end - own), strict=True):
                    rows[:, :, end - own : end] = file.get_slice(name)[layers, :, :own].to(rows.device)
    except (OSError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"Could not read the snapshot {path}: {error}. Delete it and run again.") from error
    store.lengths[slot] = len(tokens)
    return [int(t) for t in tokens]


def _restored(store: KVStore, slot: int, file: Any, length: int, most: int | None) -> int:
    """Restores a slot's states from a file; returns how many of its ``length`` rows go with them, ``most`` at most.

    Raises:
        CheckpointError: the states are not those of this model.
    """
    wanted = length if most is None else min(most, length)
    for number, states in enumerate(store.states):
        beginning = f"{_STATES}{number}."
        names = [name for name in file.keys() if name.startswith(beginning)]  # noqa: SIM118
        try:
            states.load(slot, {name.removeprefix(beginning): file.get_tensor(name) for name in names}, length)
        except ValueError as error:
            raise CheckpointError(f"A snapshot is damaged: {error}. Delete it.") from error
    while (found := min((states.restorable(slot, wanted) for states in store.states), default=wanted)) != wanted:
        wanted = found
    for states in store.states:
        states.truncate(slot, wanted)
    return wanted


def _gathered(store: KVStore, slot: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (layers, kv_heads, n, head_dim) of a slot's rows ``[start, end)``, contiguous.

    Raises:
        MemoryBudgetError: the rows do not fit the free memory.
    """
    shape, n = store.shape, end - start
    sizes.require(shape.bytes_per_token * n, torch.device("cpu"), f"A snapshot of {n} tokens")
    out = [torch.empty(shape.layers, shape.kv_heads, n, shape.head_dim, dtype=shape.dtype, device="cpu") for _ in "kv"]
    for layers in store.portions:
        for tensor, rows in zip(out, store.stored(slot, layers), strict=True):
            tensor[layers] = rows[:, :, start:end].to(shape.dtype)
    return out[0], out[1]


def head(path: Path | str) -> Head | None:
    """Reads a snapshot's :class:`Head` without its keys and values; None if it is no snapshot of longdraft.

    Raises:
        CheckpointError: the file is damaged.
        OSError: it is missing or cannot be read.
    """
    try:
        with safe_open(Path(path), framework="pt") as file:
            meta = file.metadata() or {}
            if meta.get("format") != FORMAT:
                return None
            layers = tuple(int(n) for n in meta.get("feature_layers", "").split(",") if n)
            tokens = array("q", file.get_tensor("tokens").tolist())
            return Head(tokens, meta.get("target", ""), layers, meta.get("kind", ""), meta.get("parent", ""))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"The snapshot {path} is damaged: {error}.") from error


def token_count(path: Path | str) -> int:
    """The number of tokens in a snapshot, read from its header; 0 if the file cannot be read."""
    try:
        with safe_open(Path(path), framework="pt") as file:
            return int(file.get_slice("tokens").get_shape()[0])
    except (OSError, SafetensorError):
        return 0


def serves(path: Path | str, feature_layers: Sequence[int] = ()) -> bool:
    """True if the file is a snapshot that holds these layers' hidden states; reads its header only."""
    try:
        with safe_open(Path(path), framework="pt") as file:
            saved = (file.metadata() or {}).get("feature_layers")
    except (OSError, SafetensorError):
        return False
    return not feature_layers or saved == ",".join(map(str, feature_layers))


def rows_kind(path: Path | str) -> str:
    """The kind of the rows in a snapshot, read from its header; "" if the file cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return str((file.metadata() or {}).get("kind", ""))
    except (OSError, SafetensorError):
        return ""
