"""A prompt cache that survives restarts: slots are written to disk while the server is idle, and read when needed.

A file is a snapshot (:mod:`longdraft.memory.snapshot`) of a slot. Files are written under another name, then renamed: a
killed process leaves no incomplete file. At the start of the server only the files' token ids are read. Keys and
values are read when a prompt shares their prefix.
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

_FILE_SUFFIX = ".kv.safetensors"
# An estimate of a file's size adds this for the header, and this for each tensor of a state in the header.
_MAX_HEADER_BYTES, _MAX_ENTRY_BYTES = 1024, 256


@dataclass(frozen=True)
class _SnapshotFile:
    """A snapshot in the folder."""

    tokens: array[int]  # empty for a snapshot of another target
    feature_layers: tuple[int, ...]  # layers whose hidden states the snapshot has
    size: int  # in bytes
    rope_regime: str  # only a prompt with this value can use the KV
    checkpoint_lengths: frozenset[int]  # of a model with recurrent layers, numbers of tokens that can be restored


def create_snapshot_folder(folder: Path) -> None:
    """Creates the folder. Raises CheckpointError if it cannot be written."""
    with file_errors(folder, f"Prompts cannot be kept in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


class DiskPromptCache(PromptCache):
    """A prompt cache in memory and in a folder. Only the engine thread calls it.

    Tenants share the KV of common prefixes, in memory and on disk. Outputs reveal nothing about other tenants, but a
    fast first token can reveal that somebody has sent the same prefix.

    Args:
        folder: created if missing. Only one server at a time may use it.
        fingerprint: identifies the target. Snapshots of other targets count towards ``max_bytes``, but are not read.
        max_bytes: limit of all snapshots in the folder. The least recently used are deleted first.
        min_tokens: a slot is written if this many tokens, and a quarter of the slot's tokens, are in no file. A file is
            read if it has this many tokens of the prompt more than memory has.
        feature_layers: see :class:`PromptCache`. Snapshots without the needed hidden states are not read.
        tree_bytes: limit of the prefix tree, see :class:`PromptCache`.

    Raises:
        CheckpointError: the folder cannot be created or read.
    """

    def __init__(
        self, folder: Path, fingerprint: str, max_bytes: int, min_tokens: int = 256,
        feature_layers: tuple[int, ...] = (), tree_bytes: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(feature_layers, tree_bytes)
        self._folder, self._fingerprint = folder, fingerprint
        self._max_bytes, self._min_tokens = max_bytes, max(1, min_tokens)
        self._files: OrderedDict[Path, _SnapshotFile] = OrderedDict()  # the least recently used file is the first
        # Slots that were written since a request last used them. A slot is not written again if its file is deleted:
        # two slots that do not fit the folder together would replace each other for ever.
        self._written: set[int] = set()
        self._warned: set[str] = set()  # keys of the warnings that were logged
        create_snapshot_folder(folder)
        with file_errors(folder, f"Prompts cannot be kept in {folder}"):
            self._scan_folder()

    def reuse_prefix(self, slot: int, prompt: Sequence[int], chunk_size: int = 1, rope_regime: str = "") -> int:
        """Loads a file if it has more of the prompt than memory has, then calls :meth:`PromptCache.reuse_prefix`."""
        self._written.discard(slot)
        prompt = to_array(prompt)
        tokens = prompt[:-1]  # the last token is always computed, for its logits
        len_in_slots = max(self._reusable_len(s, tokens, chunk_size, rope_regime) for s in range(len(self.tokens)))
        len_in_memory = max(len_in_slots, self._prefix_len_in_tree(tokens, chunk_size, rope_regime))
        path, len_in_file = self._best_match(tokens, rope_regime)
        len_in_file = len_in_file // chunk_size * chunk_size
        if path is not None and len_in_file >= self._min_tokens:
            self._mark_used(path)
            if len_in_file >= len_in_memory + self._min_tokens:
                self._save_to_tree(slot, 0)  # from token 0 on, because the slot is overwritten next
                self._load(path, slot, len_in_file, rope_regime)
        return super().reuse_prefix(slot, prompt, chunk_size, rope_regime)

    def save_next(self) -> bool:
        """Writes the longest of the slots that are in no file. Call it while nothing is decoded.

        Other files are deleted first to make room. If writing fails (no space, too large), a warning is logged once.
        Returns True if a slot was written; there may be more to write.
        """
        if self.store is None:
            return False
        for slot in sorted(range(len(self.tokens)), key=lambda slot: -len(self.tokens[slot])):
            tokens = self.tokens[slot]
            # A slot whose KV is longer than its token ids is being decoded.
            if len(tokens) < self._min_tokens or len(tokens) != self.store.lengths[slot] or slot in self._written:
                continue
            num_new = len(tokens) - self._best_match(tokens, self.rope_regimes[slot])[1]
            # A growing conversation is written again only when a quarter of it is new, so only a few times.
            if num_new >= max(self._min_tokens, len(tokens) // 4) and self._write(slot, tokens):
                self._written.add(slot)
                return True
        return False

    def _best_match(self, tokens: array[int], rope_regime: str) -> tuple[Path | None, int]:
        """Returns (the usable file that shares the longest prefix with ``tokens``, the prefix's length)."""
        assert self.store is not None
        feature_layers, best_path, best_len = self.store.feature_layers, None, 0
        for path, file in self._files.items():
            if file.rope_regime == rope_regime and (not feature_layers or file.feature_layers == feature_layers):
                shared_len = common_prefix_len(file.tokens, tokens)
                if file.checkpoint_lengths:
                    shared_len = max((n for n in file.checkpoint_lengths if n <= shared_len), default=0)
                if shared_len > best_len:
                    best_path, best_len = path, shared_len
        return best_path, best_len

    def _write(self, slot: int, tokens: array[int]) -> bool:
        """Writes a slot, and deletes files that the new file makes superfluous. Returns False if that fails."""
        assert self.store is not None
        store, rope_regime = self.store, self.rope_regimes[slot]
        size = len(tokens) * (store.bytes_per_token + tokens.itemsize) + _MAX_HEADER_BYTES
        if store.features is not None:
            size += len(tokens) * store.features[slot, 0].nbytes  # [slot, 0]: the hidden states of one token
        state_tensors = (tensor for states in store.states for tensor in states.save(slot).values())
        size += sum(tensor.nbytes + _MAX_ENTRY_BYTES for tensor in state_tensors)
        superfluous = [path for path, file in self._files.items() if self._is_superfluous(file, tokens, rope_regime)]
        evicted = self._choose_evicted(size, superfluous)
        if evicted is None:
            problem = f"A text of {len(tokens)} tokens takes {size} bytes, more than --snapshot-gib allows: raise it."
            self._warn("large", problem)
            return False
        key = (self._fingerprint, store.feature_layers, *([rope_regime] if rope_regime else []))
        name = hashlib.sha256(repr(key).encode() + tokens.tobytes()).hexdigest()
        path = self._folder / (name[:24] + _FILE_SUFFIX)
        try:
            free_bytes = shutil.disk_usage(self._folder).free
            if free_bytes + sum(self._files[old].size for old in evicted) < size:  # files would be deleted in vain
                raise CheckpointError(f"{size} bytes are needed on the disk of {self._folder}, {free_bytes} are free.")
            for old in evicted:
                self._drop(old)
            snapshot.save(store, slot, tokens, self._fingerprint, path, rope_regime)
            header = snapshot.read_header(path)
            assert header is not None
            self._files[path] = self._describe(path, header)
        except (OSError, MemoryBudgetError, RuntimeError) as error:  # RuntimeError: a GPU is out of memory
            self._warn("write", str(error))
            return False
        for old in superfluous:
            self._drop(old)
        return True

    def _is_superfluous(self, file: _SnapshotFile, tokens: array[int], rope_regime: str) -> bool:
        """True if a new file with ``tokens`` will have all that ``file`` has."""
        assert self.store is not None
        same_kind = file.rope_regime == rope_regime and file.feature_layers in ((), self.store.feature_layers)
        return same_kind and 0 < len(file.tokens) == common_prefix_len(file.tokens, tokens)

    def _choose_evicted(self, size: int, superfluous: list[Path]) -> list[Path] | None:
        """Returns the files to delete before ``size`` bytes are written: ``superfluous`` files, then the least recently
        used. Returns None if deleting all files is not enough."""
        total = size + sum(file.size for file in self._files.values())
        evicted: list[Path] = []
        for path in dict.fromkeys((*superfluous, *self._files)):
            if total > self._max_bytes:
                evicted.append(path)
                total -= self._files[path].size
        return evicted if total <= self._max_bytes else None

    def _mark_used(self, path: Path) -> None:
        """Makes a file the last to be evicted."""
        self._files.move_to_end(path)
        with contextlib.suppress(OSError):
            path.touch()  # the next start sorts the files by this time

    def _load(self, path: Path, slot: int, num_tokens: int, rope_regime: str) -> None:
        """Loads a file's first ``num_tokens`` tokens into a slot. A damaged file is deleted."""
        assert self.store is not None
        try:
            tokens = snapshot.load(self.store, slot, self._fingerprint, path, num_tokens)
        except (CheckpointError, MemoryBudgetError) as error:
            self._warn(str(path), str(error))
            tokens = []
            if isinstance(error, CheckpointError):
                self._drop(path)
        # If loading failed, the slot's old KV may have been overwritten.
        self.store.truncate(slot, len(tokens))
        self.tokens[slot], self.rope_regimes[slot] = to_array(tokens), rope_regime

    def _scan_folder(self) -> None:
        """Reads the headers of the folder's files. Deletes damaged files, and temporary files of a killed process."""
        for temporary_path in self._folder.glob(f"*{_FILE_SUFFIX}*{snapshot.PART_SUFFIX}"):
            temporary_path.unlink(missing_ok=True)
        headers: dict[Path, snapshot.SnapshotHeader] = {}
        for path in self._folder.glob(f"*{_FILE_SUFFIX}"):
            if path.is_symlink() or not path.is_file():
                continue  # no server has written it
            try:
                header = snapshot.read_header(path)
            except CheckpointError as error:
                logger.warning("%s It is deleted.", error)
                self._drop(path)
            except (OSError, MemoryBudgetError) as error:
                logger.warning("%s cannot be read, and is left as it is: %s", path, error)
            else:
                headers |= {} if header is None else {path: header}
        for path in sorted(headers, key=lambda path: path.stat().st_mtime_ns):
            self._files[path] = self._describe(path, headers[path])

    def _describe(self, path: Path, header: snapshot.SnapshotHeader) -> _SnapshotFile:
        tokens = header.tokens if header.target_fingerprint == self._fingerprint else to_array(())
        size, lengths = path.stat().st_size, header.checkpoint_lengths
        return _SnapshotFile(tokens, header.feature_layers, size, header.rope_regime, lengths)

    def _drop(self, path: Path) -> None:
        """Deletes a file. If that fails, the next start finds it again."""
        self._files.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _warn(self, key: str, problem: str) -> None:
        """Logs a warning once for each key."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("A prompt's snapshot cannot be written or read: %s", problem)
