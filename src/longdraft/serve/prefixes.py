"""Prompts that survive a restart: slots are written to disk while the server is idle, and read where they help.

A file is a snapshot (:mod:`longdraft.memory.snapshot`), written under another name and renamed, so that a process
killed at any moment leaves no half of one. Which tokens each file holds is read at the start; its keys and values when
a prompt begins like it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longdraft.errors import CheckpointError, MemoryBudgetError
from longdraft.memory import snapshot
from longdraft.memory.prompt_cache import PromptCache, common_prefix, packed

logger = logging.getLogger("longdraft")

_SUFFIX = ".kv.safetensors"
# Bytes of a file beside its tensors, at most.
_HEAD = 1024
# Seconds without another attempt after one to write has failed: each costs a copy of the text's rows.
_PAUSE = 60.0


@dataclass(frozen=True)
class _File:
    """A snapshot in the folder: its tokens, the layers whose hidden states it has, and its bytes."""

    tokens: array[int]
    feature_layers: tuple[int, ...]
    size: int


class DiskPrefixes(PromptCache):
    """A prompt cache with a folder behind it. All calls come from one thread, the engine's.

    Tenants share rows: prompts that begin alike share the KV of their beginning, here as in memory. No text shows in
    another's output, but how soon the first token comes can tell that somebody has sent the same beginning.

    Args:
        folder: made where it is not there. One server at a time keeps its prompts in it.
        fingerprint: names the target. Another's snapshots count as bytes and are not read.
        most_bytes: of all snapshots in the folder. The one not used for longest goes first, whoever's it is.
        least_tokens: what is worth a file: a text is written if so many of its tokens are in none, and read if it saves
            so many.
        feature_layers: as of :class:`PromptCache`. Snapshots without the hidden states that a run needs are not read.

    Raises:
        CheckpointError: the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        most_bytes: int,
        least_tokens: int = 256,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        super().__init__(feature_layers)
        self._folder, self._target, self._most, self._least = folder, fingerprint, most_bytes, max(1, least_tokens)
        # The one not used for longest first. Of another target's only the size is known.
        self._files: OrderedDict[Path, _File] = OrderedDict()
        self._said: set[str] = set()
        self._not_before = 0.0  # time.monotonic() of the next attempt to write
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._find()
        except OSError as error:
            raise CheckpointError(f"Prompts cannot be kept in {folder}: {error}.") from error

    def begin(self, slot: int, prompt: Sequence[int], piece: int = 1) -> int:
        """As the base's; what a file has more of than any slot is read from it first, and no more of it than that."""
        prompt = packed(prompt)
        text = prompt[:-1]
        known = max(common_prefix(tokens, text) for tokens in self.tokens) // piece * piece
        path, shared = self._nearest(text)
        shared = shared // piece * piece
        if path is not None and shared >= self._least:
            self._files.move_to_end(path)
            with contextlib.suppress(OSError):
                path.touch()  # the next start finds out by this
            if shared >= known + self._least:
                self._load(path, slot, shared)
        return super().begin(slot, prompt, piece)

    def keep(self) -> bool:
        """Writes one slot's text that is in no file, the longest; call it while nobody is decoded.

        Other texts make room for it first, and its own beginnings go when it is there. That one cannot be written (no
        space, too large) is said once, at warning level; it stays in its slot.

        Returns:
            Whether it wrote one: there may be more to do.
        """
        if self.store is None or time.monotonic() < self._not_before:
            return False
        for slot in sorted(range(len(self.tokens)), key=lambda slot: -len(self.tokens[slot])):
            text = self.tokens[slot]
            # Rows of a text that is being decoded are its own business.
            if len(text) < self._least or len(text) != self.store.lengths[slot]:
                continue
            if len(text) - self._nearest(text)[1] >= self._least and self._write(slot, text):
                return True
        return False

    # --- files ---

    def _nearest(self, text: array[int]) -> tuple[Path | None, int]:
        """The file that shares the longest prefix with a text, of those with the hidden states needed; how long."""
        assert self.store is not None
        needed, best, longest = self.store.feature_layers, None, 0
        for path, file in self._files.items():
            if not needed or file.feature_layers == needed:
                shared = common_prefix(file.tokens, text)
                if shared > longest:
                    best, longest = path, shared
        return best, longest

    def _write(self, slot: int, text: array[int]) -> bool:
        assert self.store is not None
        store = self.store
        features = 0 if store.features is None else store.features[slot, 0].nbytes
        size = len(text) * (store.shape.bytes_per_token + features + text.itemsize) + _HEAD
        beginnings = [path for path, file in self._files.items() if self._begins(file, text)]
        room = self._most - size
        if room < 0:
            self._say("large", f"A text of {len(text)} tokens takes {size} bytes, more than all snapshots may.")
            return False
        others = [path for path in self._files if path not in beginnings]
        going, left = [], sum(file.size for file in self._files.values())
        for path in [*beginnings, *others]:
            if left <= room:
                break
            going.append(path)
            left -= self._files[path].size
        name = hashlib.sha256(repr((self._target, store.feature_layers)).encode() + text.tobytes()).hexdigest()
        path = self._folder / (name[:24] + _SUFFIX)
        try:
            free = shutil.disk_usage(self._folder).free
            if free + sum(self._files[old].size for old in going) < size:  # nothing goes for nothing
                raise CheckpointError(f"{size} bytes are needed on the disk of {self._folder}, and {free} are free.")
            for old in going:
                self._drop(old)
            snapshot.save(store, slot, text, self._target, path)
            self._files[path] = _File(text, store.feature_layers, path.stat().st_size)
            for old in beginnings:
                self._drop(old)
        except (OSError, MemoryBudgetError, RuntimeError) as error:  # the last: a GPU has no room to gather rows
            self._not_before = time.monotonic() + _PAUSE
            self._say("write", str(error))
            return False
        return True

    def _begins(self, file: _File, text: array[int]) -> bool:
        """Whether a text's own file makes this one superfluous."""
        assert self.store is not None
        superfluous = not file.feature_layers or file.feature_layers == self.store.feature_layers
        return superfluous and 0 < len(file.tokens) == common_prefix(file.tokens, text)

    def _load(self, path: Path, slot: int, most: int) -> None:
        """Reads a file's first rows into a slot; a file that cannot be read is not tried again."""
        assert self.store is not None
        try:
            tokens = snapshot.load(self.store, slot, self._target, path, most)
        except CheckpointError as error:
            self._say(str(path), str(error))
            self._drop(path)
            tokens = []
        # Where reading has failed, some of what the slot held is overwritten.
        self.store.truncate(slot, len(tokens))
        self.tokens[slot] = packed(tokens)

    def _find(self) -> None:
        """Reads what the folder's files hold. Takes away damaged ones, and what a process that was killed left."""
        for part in self._folder.glob(f"*{_SUFFIX}*{snapshot.PART}"):
            part.unlink(missing_ok=True)
        found = [(path.stat(), path) for path in self._folder.glob(f"*{_SUFFIX}")]
        for stat, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
            try:
                head = snapshot.head(path)
            except CheckpointError as error:
                logger.warning("%s It is deleted.", error)
                self._drop(path)
                continue
            except OSError as error:
                logger.warning("%s cannot be read, and is left as it is: %s", path, error)
                continue
            if head is not None:
                own = head.target == self._target
                self._files[path] = _File(head.tokens if own else packed(()), head.feature_layers, stat.st_size)

    def _drop(self, path: Path) -> None:
        """Deletes a file. One that cannot be deleted is forgotten, and found again by the next start."""
        self._files.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _say(self, kind: str, what: str) -> None:
        """Once a kind."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("A prompt is not kept on disk, or not read from there: %s", what)
