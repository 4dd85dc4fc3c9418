"""Tokens of many texts, laid end to end: in memory, 4 bytes each, or in shards on disk that processes share.

A folder of shards is written once by ``longdraft train data --kind tokens``. Each shard is a safetensors file that
appears whole or not at all, and is mapped into memory when it is read: the tokens of a text become memory of a process
only while the text is used.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longdraft.errors import CheckpointError, PromptError
from longdraft.files import opened
from longdraft.training import feature_files
from longdraft.training.documents import Document, Skipped, documents
from longdraft.training.feature_files import INDEX
from longdraft.training.lazy import Lazy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens of a shard, at least; the last one has fewer.
SHARD = 1 << 26
ADVICE = "Delete the file and run `longdraft train data` again: it encodes what is missing."
# Every tokenizer encodes this in its own way.
_PROBE = "Tokens, encodés once: 2 + 2 = 4\n\tdef f(x): return x  # 漢字 🙂"


@dataclass(frozen=True)
class Tokens(Lazy[Document]):
    """The documents of a file, or of a shard.

    Attributes:
        ids: (N,) int32, all documents end to end.
        ends: (D,) int64, where each document ends among them. starts: (D,) int32, its first learned token.
        digest: names the content of a shard; empty in memory.
    """

    ids: torch.Tensor
    ends: torch.Tensor
    starts: torch.Tensor
    digest: str = ""

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Tokens:
        """Documents in memory."""
        ids, ends, starts = array("i"), array("q"), array("i")
        for document in documents:
            ids.extend(document.tokens)
            ends.append(len(ids))
            starts.append(document.start)
        return cls(torch.tensor(ids), torch.tensor(ends), torch.tensor(starts))

    @classmethod
    def mapped(cls, path: Path) -> Tokens:
        """A shard on disk. Raises CheckpointError if it is missing or damaged."""
        with opened(path, ADVICE) as file:
            ids, ends, starts = (file.get_tensor(name) for name in ("ids", "ends", "starts"))
            return cls(ids, ends, starts, file.metadata()["digest"])

    def __len__(self) -> int:
        return len(self.ends)

    def item(self, i: int) -> Document:
        return Document(self.slice(*self.span(i)), int(self.starts[i]))

    def span(self, i: int) -> tuple[int, int]:
        """Where a document begins and ends among the tokens."""
        return int(self.ends[i - 1]) if i else 0, int(self.ends[i])

    def slice(self, begin: int, end: int) -> list[int]:
        found: list[int] = self.ids[begin:end].tolist()
        return found


def write(
    folder: Path,
    rows: Iterable[Document | None],
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Writes the shards that a folder lacks; returns how many documents this call has added.

    Args:
        rows: the rows of the source from :func:`rows_done` on; None for one that cannot be used.
        progress: called now and then with the documents and tokens so far.
        stop: called as often; True ends the work, and whole shards are kept.

    Raises:
        CheckpointError: a shard cannot be written, or the folder's were encoded by another tokenizer.
        PromptError: there are no documents.
    """
    path, index = folder / INDEX, {"tokenizer": _fingerprint(tokenizer)}
    if path.exists():
        _check(folder, tokenizer)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        feature_files.write_index(folder, index)
    done, shard = rows_done(folder), len(shards_of(folder))
    documents, waiting, total = 0, list[Document](), 0
    size = 0

    def close() -> None:
        nonlocal shard, waiting, size
        if waiting:
            held = Tokens.of(waiting)
            tensors = {"ids": held.ids, "ends": held.ends, "starts": held.starts}
            digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors.values())).hexdigest()[:16]
            feature_files.write(_path(folder, shard), tensors, {"rows": f"{done}", "digest": digest})
            shard, waiting, size = shard + 1, [], 0

    for row in rows:
        done += 1
        if row is not None:
            waiting.append(row)
            documents, size, total = documents + 1, size + len(row.tokens), total + len(row.tokens)
        if done % 100 == 0:
            progress(documents, total)
            if stop():
                return documents
        if size >= SHARD:
            close()
    close()
    if not shard:
        raise PromptError("There is nothing to write: rows need `text`, `messages` or `tokens`.")
    feature_files.write_index(folder, index | {"rows": done})
    progress(documents, total)
    return documents


def read(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """The shards of a folder. Raises CheckpointError if some lack, are damaged, or are of another tokenizer."""
    if "rows" not in _check(folder, tokenizer):
        raise CheckpointError(f"{folder} is not finished: the same `longdraft train data` command continues it.")
    return [Tokens.mapped(path) for path in shards_of(folder)]


def sources(
    places: Iterable[str], tokenizer: PreTrainedTokenizerBase, skipped: Skipped, vocab_size: int
) -> list[Tokens]:
    """The documents of files, of corpora by name, and of folders of shards, which are not read into memory."""
    found: list[Tokens] = []
    for place in places:
        if is_shards(place):
            found += read(Path(place), tokenizer)
        else:
            found.append(Tokens.of(documents([place], tokenizer, skipped, vocab_size)))
    return found


def is_shards(path: Path | str) -> bool:
    """True for a folder of shards."""
    return (Path(path) / INDEX).is_file() and bool(shards_of(Path(path)))


def shards_of(folder: Path) -> list[Path]:
    """The shards' files, in order."""
    return sorted(folder.glob("tokens-*.safetensors"))


def rows_done(folder: Path) -> int:
    """Rows of the source that a folder's shards hold or have left out."""
    paths = shards_of(folder)
    if not paths:
        return 0
    with opened(paths[-1], ADVICE) as file:
        return int(file.metadata()["rows"])


def _check(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The folder's index. Raises CheckpointError if another tokenizer encoded it."""
    with feature_files.readable(folder / INDEX, ADVICE):
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    if index.get("tokenizer") != _fingerprint(tokenizer):
        raise CheckpointError(f"{folder} was encoded by another tokenizer: encode the text again for this target.")
    return index


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(repr(tokenizer(_PROBE)["input_ids"]).encode()).hexdigest()[:16]


def _path(folder: Path, shard: int) -> Path:
    return folder / f"tokens-{shard:05d}.safetensors"
