"""Prompts that survive a restart: slots are written to disk while the server is idle, and read when needed.

A file is a snapshot (:mod:`longdraft.memory.snapshot`) of a whole text. It is written under another name and then
renamed, so a process that is killed leaves no half-written file. The tokens of each file are read at the start, its
keys and values when a prompt begins like it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import tempfile
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longdraft.errors import CheckpointError, MemoryBudgetError
from longdraft.files import file_errors
from longdraft.memory import snapshot
from longdraft.memory.prompt_cache import PromptCache
from longdraft.memory.token_ids import common_prefix_len, to_array

logger = logging.getLogger("longdraft")

_SUFFIX = ".kv.safetensors"
# The most bytes of a file's header.
_HEADER = 1024


@dataclass(frozen=True)
class _File:
    """A snapshot in the folder. ``feature_layers``: layers whose hidden states it holds; ``size``: bytes; ``rope_regime``: of
    its rows."""

    tokens: array[int]
    feature_layers: tuple[int, ...]
    size: int
    kind: str


def create_snapshot_folder(folder: Path) -> None:
    """Creates the folder. Raises CheckpointError if nothing can be written there."""
    with file_errors(folder, f"Prompts cannot be kept in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


class DiskPromptCache(PromptCache):
    """A prompt cache with a folder behind it. All calls come from the engine's thread.

    Tenants share the KV of prompts that begin alike, here as in memory. No text shows in another's output, but an early
    first token can reveal that somebody has sent the same beginning.

    Args:
        folder: created if missing. Only one server at a time may use it.
        fingerprint: identifies the target. Snapshots of other targets count towards the bytes and are not read.
        max_bytes: limit of all snapshots in the folder. The least recently used are deleted first.
        min_tokens: a text is written if this many of its tokens, and a quarter of it, are in no file; and read if that
            saves this many.
        feature_layers: see :class:`PromptCache`. Snapshots that lack hidden states that a run needs are not read.
        tree_bytes: see :class:`PromptCache`.

    Raises:
        CheckpointError: the folder cannot be created or read.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        max_bytes: int,
        min_tokens: int = 256,
        feature_layers: tuple[int, ...] = (),
        tree_bytes: int = 0,
    ) -> None:
        super().__init__(feature_layers, tree_bytes)
        self._folder, self._target = folder, fingerprint
        self._max_bytes, self._min_tokens = max_bytes, max(1, min_tokens)
        # The least recently used first. Those of other targets have no tokens.
        self._files: OrderedDict[Path, _File] = OrderedDict()
        # Slots whose text was written since a request last used them. It is not written again after it had to go for
        # another slot's text, or two that do not fit the folder together would drive each other out for ever.
        self._written: set[int] = set()
        self._warned: set[str] = set()
        create_snapshot_folder(folder)
        with file_errors(folder, f"Prompts cannot be kept in {folder}"):
            self._find()

    def reuse_prefix(self, slot: int, prompt: Sequence[int], chunk_size: int = 1, rope_regime: str = "") -> int:
        """Like :meth:`PromptCache.reuse_prefix`, but first reads a file that has more of the prompt than any slot."""
        self._written.discard(slot)
        prompt = to_array(prompt)
        text = prompt[:-1]
        in_slots = max(self._common_prefix_len(each, text, rope_regime) for each in range(len(self.tokens)))
        known = max(in_slots, self._prefix_len_in_tree(text, rope_regime)) // chunk_size * chunk_size
        path, shared = self._nearest(text, rope_regime)
        shared = shared // chunk_size * chunk_size
        if path is not None and shared >= self._min_tokens:
            self._use(path)
            if shared >= known + self._min_tokens:
                self._save_to_tree(slot, 0)
                self._load(path, slot, shared, rope_regime)
        return super().reuse_prefix(slot, prompt, chunk_size, rope_regime)

    def save_next(self) -> bool:
        """Writes the longest text in a slot that is in no file. Call it while nothing is decoded.

        Files of other texts are deleted first to make room. If it cannot be written (no space, too large), a warning is
        logged once, and the text stays in its slot.

        Returns:
            Whether it wrote one; there may be more to write.
        """
        if self.store is None:
            return False
        for slot in sorted(range(len(self.tokens)), key=lambda slot: -len(self.tokens[slot])):
            text = self.tokens[slot]
            # A slot with more rows than its text is being decoded.
            if len(text) < self._min_tokens or len(text) != self.store.lengths[slot] or slot in self._written:
                continue
            new = len(text) - self._nearest(text, self.rope_regimes[slot])[1]
            # A text that grows is written again once a quarter of it is new: in all, a few times its length.
            if new >= max(self._min_tokens, len(text) // 4) and self._write(slot, text):
                self._written.add(slot)
                return True
        return False

    # --- files ---

    def _nearest(self, text: array[int], kind: str) -> tuple[Path | None, int]:
        """The file with the needed hidden states that shares the longest prefix with a text; how many tokens."""
        assert self.store is not None
        needed, best, longest = self.store.feature_layers, None, 0
        for path, file in self._files.items():
            if file.kind == kind and (not needed or file.feature_layers == needed):
                shared = common_prefix_len(file.tokens, text)
                if shared > longest:
                    best, longest = path, shared
        return best, longest

    def _write(self, slot: int, text: array[int]) -> bool:
        assert self.store is not None
        store, kind = self.store, self.rope_regimes[slot]
        size = len(text) * (store.shape.bytes_per_token + text.itemsize) + _HEADER
        if store.features is not None:
            size += len(text) * store.features[slot, 0].nbytes
        covered = [path for path, file in self._files.items() if self._covers(file, text, kind)]
        deleted = self._deleted_for(size, covered)
        if deleted is None:
            problem = f"A text of {len(text)} tokens takes {size} bytes, more than --snapshot-gib leaves: raise it."
            self._warn("large", problem)
            return False
        made = (self._target, store.feature_layers, *([kind] if kind else []))
        name = hashlib.sha256(repr(made).encode() + text.tobytes()).hexdigest()
        path = self._folder / (name[:24] + _SUFFIX)
        try:
            free = shutil.disk_usage(self._folder).free
            if free + sum(self._files[old].size for old in deleted) < size:  # before anything is deleted in vain
                raise CheckpointError(f"{size} bytes are needed on the disk of {self._folder}, and {free} are free.")
            for old in deleted:
                self._drop(old)
            snapshot.save(store, slot, text, self._target, path, kind)
            self._files[path] = _File(text, store.feature_layers, path.stat().st_size, kind)
        except (OSError, MemoryBudgetError, RuntimeError) as error:  # RuntimeError: a GPU has no room to gather rows
            self._warn("write", str(error))
            return False
        for old in covered:
            self._drop(old)
        return True

    def _covers(self, file: _File, text: array[int], kind: str) -> bool:
        """True if a text has all that a file of this target has."""
        assert self.store is not None
        same = file.kind == kind and file.feature_layers in ((), self.store.feature_layers)
        return same and 0 < len(file.tokens) == common_prefix_len(file.tokens, text)

    def _deleted_for(self, size: int, covered: list[Path]) -> list[Path] | None:
        """Files to be deleted before one of ``size`` bytes is written: those that it covers, then the least recently
        used. None if they do not make room."""
        total = size + sum(file.size for file in self._files.values())
        deleted: list[Path] = []
        for path in dict.fromkeys((*covered, *self._files)):
            if total > self._max_bytes:
                deleted.append(path)
                total -= self._files[path].size
        return deleted if total <= self._max_bytes else None

    def _use(self, path: Path) -> None:
        """Makes a file the last to be deleted."""
        self._files.move_to_end(path)
        with contextlib.suppress(OSError):
            path.touch()  # the next start orders the files by this

    def _load(self, path: Path, slot: int, count: int, kind: str) -> None:
        """Reads the first ``count`` rows of a file into a slot. A damaged file is deleted."""
        assert self.store is not None
        try:
            tokens = snapshot.load(self.store, slot, self._target, path, count)
        except (CheckpointError, MemoryBudgetError) as error:
            self._warn(str(path), str(error))
            tokens = []
            if isinstance(error, CheckpointError):
                self._drop(path)
        # If reading failed, part of the slot's text may have been overwritten.
        self.store.truncate(slot, len(tokens))
        self.tokens[slot], self.rope_regimes[slot] = to_array(tokens), kind

    def _find(self) -> None:
        """Reads the tokens of the folder's files. Deletes damaged files, and those that a killed process left."""
        for part in self._folder.glob(f"*{_SUFFIX}*{snapshot.PART_SUFFIX}"):
            part.unlink(missing_ok=True)
        found: dict[Path, snapshot.SnapshotHeader] = {}
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path.is_symlink() or not path.is_file():
                continue  # nothing that a server wrote
            try:
                head = snapshot.read_header(path)
            except CheckpointError as error:
                logger.warning("%s It is deleted.", error)
                self._drop(path)
            except (OSError, MemoryBudgetError) as error:
                logger.warning("%s cannot be read, and is left as it is: %s", path, error)
            else:
                found |= {} if head is None else {path: head}
        for path in sorted(found, key=lambda path: path.stat().st_mtime_ns):
            head = found[path]
            tokens = head.tokens if head.target_fingerprint == self._target else to_array(())
            self._files[path] = _File(tokens, head.feature_layers, path.stat().st_size, head.rope_regime)

    def _drop(self, path: Path) -> None:
        """Deletes a file. If that fails, the next start finds it again."""
        self._files.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _warn(self, kind: str, problem: str) -> None:
        """Logs a warning once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("A prompt is not kept on disk, or not read from there: %s", problem)
