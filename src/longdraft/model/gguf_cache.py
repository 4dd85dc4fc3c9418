"""A cache of the configurations and tokenizers that transformers makes of GGUF files, which can take seconds.

An entry is a folder with config.json and the tokenizer's files, named by a digest of the file's metadata. It is kept
only if what is read back equals what was made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import AutoConfig, PreTrainedTokenizerFast

from longdraft.files import TEXT, regular
from longdraft.folders import cache_folder

logger = logging.getLogger(__name__)

# Number of entries that are kept, the newest ones. Each takes some 10 MB.
MOST = 16
# To be raised when the meaning of an entry changes.
_FORMAT = 4
# The file with the digest of the others.
_SEAL = "seal"


@dataclass(frozen=True)
class Metadata:
    """The configuration and the tokenizer of a file."""

    config: Any
    tokenizer: Any

    def facts(self) -> tuple[object, ...]:
        """Everything that decides what they do, for comparison."""
        words = self.tokenizer
        settings = {k: v for k, v in self.config.to_dict().items() if k != "_name_or_path"}
        return (
            type(self.config), settings, json.loads(words.backend_tokenizer.to_str()), words.special_tokens_map,
            words.chat_template, words.padding_side, words.model_input_names,
        )  # fmt: skip


def folder_of(*parts: bytes | memoryview) -> Path:
    """The folder of the cache for a file with these bytes of metadata, which need not exist."""
    versions = f"{_FORMAT} {transformers.__version__} {tokenizers.__version__}".encode()
    return cache_folder() / "gguf" / _digest([versions, *parts])[:32]


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    """A digest of all parts, which says where each one ends."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _seal(folder: Path) -> str:
    """A digest of an entry's files."""
    files = sorted(file for file in folder.iterdir() if file.name != _SEAL)
    parts = [part for file in files for part in (file.name.encode(), regular(file, TEXT).read_bytes())]
    return _digest(parts)


def read(folder: Path) -> Metadata | None:
    """Reads a folder of the cache; None if there is none, or a damaged one, which is removed."""
    try:
        if regular(folder / _SEAL).read_text(encoding="ascii") != _seal(folder):
            raise ValueError("its files are not those that were written")
        # Not by the model's own tokenizer class: some change what they read, as Qwen2's adds a normalizer.
        words = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        return Metadata(AutoConfig.from_pretrained(str(folder), local_files_only=True), words)
    except Exception as error:  # a damaged file can raise any type; the entry is made again
        if not isinstance(error, FileNotFoundError):
            logger.info("What was kept of a GGUF file in %s cannot be read: %s", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def keep(folder: Path, made: Metadata) -> None:
    """Writes an entry, completely or not at all, if it is the same when read back."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    except OSError as error:
        logger.info("The tokenizer of a GGUF file cannot be kept in %s: %s", folder.parent, error.strerror)
        return
    try:
        made.tokenizer.save_pretrained(part)
        made.config.save_pretrained(part)
        (part / _SEAL).write_text(_seal(part), encoding="ascii")
        back = read(part)
        if back is not None and back.facts() == made.facts():
            with suppress(OSError):  # another process was first
                part.rename(folder)
            entries = [f for f in folder.parent.iterdir() if not f.name.startswith(".")]
            for old in sorted(entries, key=lambda f: f.stat().st_mtime)[:-MOST]:
                shutil.rmtree(old, ignore_errors=True)
    except Exception as error:  # no space, or a tokenizer that cannot be written: the entry is made again next time
        logger.info("The tokenizer of a GGUF file is not kept: %s", error)
    finally:
        shutil.rmtree(part, ignore_errors=True)
