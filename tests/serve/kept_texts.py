"""A stand-in for an engine on a cache with a folder behind it: the KV of a token is the token itself.

In a process of its own, :func:`kill_at_every_point` keeps texts and kills its children.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from longdraft.memory import snapshot
from longdraft.memory.store import KVShape, KVStore
from longdraft.serve.prefixes import DiskPrefixes

SHAPE = KVShape(2, 1, 4, torch.float32)
# Bytes of a snapshot of n tokens: keys, values, tokens; and its head, at most.
ROW, HEAD = SHAPE.bytes_per_token + 8, 1024


class Texts(DiskPrefixes):
    """A cache that is open, with slots of 200 rows, where 4 tokens are worth a file."""

    def __init__(
        self, folder: Path, most: int = 1 << 30, slots: int = 2, rows: int = 200, target: str = "target",
        layers: tuple[int, ...] = (), pause: float = 60.0,
    ) -> None:  # fmt: skip
        super().__init__(folder, target, most, 4, pause=pause)
        self.open(lambda slots, rows: KVStore(SHAPE, slots, rows, feature_layers=layers, feature_size=3), slots, rows)

    def read(self, prompt: list[int], slot: int = 0, piece: int = 1) -> int:
        """Reads a prompt as an engine does. How much of it was there."""
        kept = self.begin(slot, prompt, piece)
        store = self.store
        assert store is not None and store.lengths[slot] == kept
        new = torch.tensor(prompt[kept:], dtype=torch.float32)[:, None]
        for tensor in (store.keys, store.values):
            tensor[:, slot, :, kept : len(prompt)] = new
        if store.features is not None:
            store.features[slot, kept : len(prompt)] = new.expand(-1, store.features.shape[2])
        store.commit(slot, range(len(prompt) - kept))
        self.remember(slot, prompt)
        assert self.held(slot) == prompt
        return kept

    def held(self, slot: int) -> list[int]:
        """The tokens whose KV a slot holds."""
        store = self.store
        assert store is not None
        found = [store.keys[0, slot, 0, :, 0], store.values[-1, slot, 0, :, -1]]
        found += [] if store.features is None else [store.features[slot, :, -1]]
        first, *others = ([int(x) for x in rows[: store.lengths[slot]]] for rows in found)
        assert all(other == first for other in others)
        return first

    def keep_all(self) -> int:
        """How many files it has written."""
        written = 0
        while self.keep():
            written += 1
        return written


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


OLD, NEW = list(range(100, 140)), list(range(200, 320))


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half(tensors: object, path: Path, metadata: object) -> None:
    save_file(tensors, path, metadata=metadata)
    with Path(path).open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    die()


def whole(*given: object) -> None:
    save(*given)
    die()


save, save_file = snapshot.save, snapshot.save_file
# What is replaced by what, so that the second text is being written when the process dies.
POINTS = {
    "at once": (snapshot, "save", die),
    "file is empty": (snapshot, "save_file", die),
    "file is half": (snapshot, "save_file", half),
    "not on disk yet": (os, "fsync", die),
    "without its name": (Path, "replace", die),
    "with its name": (snapshot, "save", whole),
}


def keep_and_die(folder: Path, point: str) -> None:
    texts = Texts(folder)
    for text in (OLD, NEW[:60]):
        texts.read(text)
        texts.keep()
    texts.read(NEW)
    where, name, instead = POINTS[point]
    setattr(where, name, instead)
    texts.keep()


def keep_for_ever(folder: Path) -> None:
    """Texts that grow, and others: files come and go all the time."""
    texts = Texts(folder, most=20 * (HEAD + 100 * ROW))
    for i in range(1 << 30):
        texts.read([i // 8 % 50, *range(10 + i % 8 * 20)])
        texts.keep()


def kill_at_every_point(place: Path) -> None:
    """Makes a folder for each point at which a process can die, and leaves there what was on disk at that moment."""
    for point in POINTS:
        if not (child := os.fork()):
            keep_and_die(place / point, point)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, point
    for number in range(6):
        if not (child := os.fork()):
            keep_for_ever(place / "any time")
        time.sleep(0.05 + 0.013 * number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        # Whatever is there can be used.
        texts = Texts(place / "any time")
        assert not list((place / "any time").glob("*.part"))
        for i in range(50):
            texts.read([i, *range(170)])
