"""A cache of the configurations and tokenizers that transformers makes of GGUF files, which can take it seconds.

In the cache folder, by a digest of the metadata: config.json and the tokenizer's files. What is read back is compared
with what was made before anything is kept, so that a second start gets what the first one got.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import AutoConfig, PreTrainedTokenizerFast

from longdraft.folders import cache_folder

logger = logging.getLogger(__name__)

# Models whose metadata is kept: those made last. Each takes some 10 MB.
MOST = 16
# Raise it when what is kept means something else than before.
_FORMAT = 1


@dataclass(frozen=True)
class Metadata:
    """Configuration and tokenizer of a file."""

    config: Any
    tokenizer: Any

    def facts(self) -> tuple[object, ...]:
        """All that decides what they do, to compare two of them."""
        words = self.tokenizer
        made = json.loads(words.backend_tokenizer.to_str())
        own = made, words.special_tokens_map, words.chat_template, words.padding_side, words.model_input_names
        settings = {k: v for k, v in self.config.to_dict().items() if k != "_name_or_path"}
        return type(self.config), settings, *own


def folder_of(*parts: bytes | memoryview) -> Path:
    """The cache's folder for a file with these bytes of metadata. It need not exist."""
    digest = hashlib.sha256(f"{_FORMAT} {transformers.__version__} {tokenizers.__version__}".encode())
    for part in parts:
        digest.update(part)
    return cache_folder() / "gguf" / digest.hexdigest()[:32]


def read(folder: Path) -> Metadata | None:
    """Reads a folder of the cache; None where there is none, or a damaged one, which is removed."""
    if not (folder / "config.json").is_file():
        return None
    try:
        # Not by the class of the model's own: some change what they are given, as Qwen2's adds a normalizer.
        words = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        return Metadata(AutoConfig.from_pretrained(str(folder), local_files_only=True), words)
    except Exception as error:  # whatever a damaged file sets off; it is made again
        logger.info("What was kept of a GGUF file in %s cannot be read: %s", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def keep(folder: Path, made: Metadata) -> None:
    """Keeps it, whole or not at all, if it is the same when read back."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    except OSError as error:
        logger.info("The tokenizer of a GGUF file cannot be kept in %s: %s", folder.parent, error.strerror)
        return
    try:
        made.tokenizer.save_pretrained(part)
        made.config.save_pretrained(part)
        back = read(part)
        if back is not None and back.facts() == made.facts():
            with suppress(OSError):  # another process was first
                part.rename(folder)
            _forget(folder.parent)
    except Exception as error:  # no space, or a tokenizer that cannot be written: it is made again the next time
        logger.info("The tokenizer of a GGUF file is not kept: %s", error)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _forget(parent: Path) -> None:
    """Removes what was made before the last ones."""
    made = sorted((f for f in parent.iterdir() if not f.name.startswith(".")), key=lambda f: f.stat().st_mtime)
    for old in made[:-MOST]:
        shutil.rmtree(old, ignore_errors=True)
