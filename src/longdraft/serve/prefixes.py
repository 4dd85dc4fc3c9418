"""Prompts that survive a restart: what slots hold, written to disk while nobody is decoded, and read where it helps.

A file is a snapshot (:mod:`longdraft.kv.snapshot`), written beside and renamed, so that a process that is killed at any
moment leaves no half of one. Which tokens each holds is known from the start; keys and values are read when a prompt
begins like them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from longdraft.errors import CheckpointError, MemoryBudgetError
from longdraft.kv import snapshot
from longdraft.kv.prompt_cache import PromptCache, common_prefix

logger = logging.getLogger("longdraft")

_SUFFIX = ".kv.safetensors"
# A file that is being written is younger than this; older ones were left by a process that was killed.
_WRITING_SECONDS = 60.0


class DiskPrefixes(PromptCache):
    """A prompt cache with a folder behind it.

    Rows are shared by prompts that begin alike, as in memory: no text shows, but how soon the first token comes can
    tell that somebody has sent the same beginning.

    Args:
        folder: made where it is not there. One server at a time keeps its prompts in it.
        fingerprint: names the target; another one's files are left alone, and not read.
        most_bytes: of all files; the one not used for longest goes first.
        least_tokens: shorter texts are not worth a file.
        feature_layers: as of :class:`PromptCache`.

    Raises:
        CheckpointError: the folder cannot be made.
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
        self._folder, self._target, self._most, self._least = folder, fingerprint, most_bytes, least_tokens
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be made: {error.strerror}.") from error
        # Tokens of each file, the one not used for longest first.
        self._files: OrderedDict[Path, list[int]] = OrderedDict()
        self._said: set[str] = set()
        self._unkept: set[bytes] = set()  # texts that could not be written
        self._find()

    def begin(self, slot: int, prompt: Sequence[int], piece: int = 1) -> int:
        """As the base's; what a file has more of than any slot is read from it first."""
        assert self.store is not None
        wanted = list(prompt[:-1])
        known = max(common_prefix(tokens, wanted) for tokens in self.tokens)
        path = max(self._files, key=lambda p: common_prefix(self._files[p], wanted), default=None)
        if path is not None and common_prefix(self._files[path], wanted) >= known + self._least:
            self._load(path, slot)
        return super().begin(slot, prompt, piece)

    def keep(self) -> bool:
        """Writes one slot's text that is on no file yet, the longest; whether there may be more to do.

        A few tokens at the end, such as an answer's, are not worth another file: they are read again.
        """
        if self.store is None:
            return False
        texts = {slot: tokens for slot, tokens in enumerate(self.tokens) if len(tokens) == self.store.lengths[slot]}
        for slot in sorted(texts, key=lambda slot: -len(texts[slot])):
            tokens = texts[slot]
            there = any(common_prefix(kept, tokens) > len(tokens) - self._least for kept in self._files.values())
            if len(tokens) >= self._least and not there and _name(tokens) not in self._unkept:
                return self._write(slot, tokens)
        return False

    def _write(self, slot: int, tokens: list[int]) -> bool:
        assert self.store is not None
        path = self._folder / (_name(tokens).hex()[:24] + _SUFFIX)
        features = 0 if self.store.features is None else self.store.features[slot, 0].nbytes
        size = len(tokens) * (self.store.shape.bytes_per_token + features + 8) + 4096
        if size > self._most:
            self._unkept.add(_name(tokens))
            self._say(
                f"A text of {len(tokens)} tokens takes {size} bytes, more than all snapshots may: it is not kept."
            )
            return True
        shorter = [old for old, kept in self._files.items() if common_prefix(kept, tokens) > len(kept) - self._least]
        for old in shorter:
            self._drop(old)
        while self._files and sum(map(_size, self._files)) + size > self._most:
            self._drop(next(iter(self._files)))
        try:
            snapshot.save(self.store, slot, tokens, self._target, path)
        except (CheckpointError, MemoryBudgetError, RuntimeError, TypeError) as error:
            self._unkept.add(_name(tokens))
            self._say(f"Prompts are not kept on disk: {error}")
            return True
        self._files[path] = list(tokens)
        return True

    def _load(self, path: Path, slot: int) -> None:
        assert self.store is not None
        if len(self._files[path]) > self.store.capacity:
            return
        try:
            self.tokens[slot] = snapshot.load(self.store, slot, self._target, path)
        except CheckpointError as error:
            self._say(str(error))
            self.store.truncate(slot, 0)
            self.tokens[slot] = []
            self._drop(path)
            return
        if not self.tokens[slot]:  # it lacks the hidden states that are wanted here
            self.store.truncate(slot, 0)
            self._drop(path)
            return
        self._files.move_to_end(path)
        path.touch()

    def _find(self) -> None:
        """Reads which tokens the folder's files hold; takes away what a killed process left."""
        for part in self._folder.glob(f"*{_SUFFIX}*.part"):
            if time.time() - part.stat().st_mtime > _WRITING_SECONDS:
                part.unlink(missing_ok=True)
        for path in sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda p: p.stat().st_mtime):
            try:
                with safe_open(path, framework="pt") as file:
                    meta = file.metadata() or {}
                    if meta.get("target") == self._target:
                        self._files[path] = file.get_tensor("tokens").tolist()
            except (OSError, SafetensorError) as error:
                logger.warning("%s is damaged and taken away: %s", path, error)
                path.unlink(missing_ok=True)

    def _drop(self, path: Path) -> None:
        self._files.pop(path, None)
        path.unlink(missing_ok=True)

    def _say(self, what: str) -> None:
        """Once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s", what)


def _name(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(array("q", tokens).tobytes()).digest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
