"""Tokens of many texts, laid end to end: in memory, 4 bytes each, or in shards on disk that processes share.

A folder of shards is written once by ``longdraft train data --kind tokens``. Each shard is a safetensors file that
appears whole or not at all, and is mapped into memory when it is read: the tokens of a text become memory of a process
only while the text is used.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from longdraft.errors import CheckpointError, PromptError
from longdraft.files import naming, opened, read_json, replacing
from longdraft.training.documents import Document, Skipped, documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INDEX = "index.json"
# Tokens of a shard, at least; the last one has fewer.
SHARD = 1 << 26
ADVICE = "Delete the file and run `longdraft train data` again: it encodes what is missing."
# Stands behind the last row.
_END = Document([0, 0])
# Every tokenizer encodes this in its own way.
_PROBE = "Tokens, encodés once: 2 + 2 = 4\n\tdef f(x): return x  # 漢字 🙂"


@dataclass(frozen=True)
class Tokens(Sequence[Document]):
    """The documents of a file, or of a shard, made when they are read, so that millions take little memory.

    Attributes:
        ids: (N,) int32, all documents end to end.
        ends: (D,) int64, where each document ends among them. starts: (D,) int32, its first learned token.
        digest: names the content. mapped: the tokens are on disk.
    """

    ids: torch.Tensor
    ends: torch.Tensor
    starts: torch.Tensor
    digest: str
    mapped: bool = False

    @classmethod
    def of(cls, documents: Iterable[Document | None]) -> Tokens:
        """Documents in memory."""
        ids, ends, starts = array("i"), array("q"), array("i")
        for document in filter(None, documents):
            ids.extend(document.tokens)
            ends.append(len(ids))
            starts.append(document.start)
        digest = hashlib.sha256(b"".join(each.tobytes() for each in (ids, ends, starts))).hexdigest()[:16]
        return cls(torch.tensor(ids), torch.tensor(ends), torch.tensor(starts), digest)

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """A shard on disk. Raises CheckpointError if it is missing or damaged."""
        with opened(path, ADVICE) as file:
            ids, ends, starts = (file.get_tensor(name) for name in ("ids", "ends", "starts"))
            return cls(ids, ends, starts, file.metadata()["digest"], True)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> Document:  # type: ignore[override]  # no slices
        return Document(self.slice(int(self.ends[i - 1]) if i else 0, int(self.ends[i])), int(self.starts[i]))

    def slice(self, begin: int, end: int) -> list[int]:
        found: list[int] = self.ids[begin:end].tolist()
        return found


def sources(
    places: Iterable[str], tokenizer: PreTrainedTokenizerBase, skipped: Skipped, vocab_size: int
) -> list[Tokens]:
    """The documents of files and folders, and of folders of shards, which are not read into memory.

    Raises CheckpointError if a folder's shards are not finished, are damaged, or are of another tokenizer.
    """
    found: list[Tokens] = []
    for place in places:
        folder = Path(place)
        if not ((folder / INDEX).is_file() and shards_of(folder)):
            found.append(Tokens.of(documents([place], tokenizer, skipped, vocab_size)))
            continue
        if "rows" not in _index(folder, tokenizer):
            raise CheckpointError(f"{folder} is not finished: the same `longdraft train data` command continues it.")
        found += map(Tokens.read, shards_of(folder))
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
    index = _index(folder, tokenizer)
    done, documents, total, waiting, size = rows_done(folder), 0, 0, list[Document](), 0
    for row in chain(rows, [_END]):
        if waiting and (row is _END or size >= SHARD):
            held = Tokens.of(waiting)
            tensors = {"ids": held.ids, "ends": held.ends, "starts": held.starts}
            with replacing(folder / f"tokens-{len(shards_of(folder)):05d}.safetensors") as part:
                save_file(tensors, part, {"rows": f"{done}", "digest": held.digest})
            waiting, size = [], 0
        if row is _END:
            break
        done += 1
        if row is not None:
            waiting.append(row)
            documents, total, size = documents + 1, total + len(row.tokens), size + len(row.tokens)
        if done % 100 == 0:
            progress(documents, total)
            if stop():
                return documents
    if not shards_of(folder):
        raise PromptError("There is nothing to write: rows need `text`, `messages` or `tokens`.")
    with replacing(folder / INDEX) as part:
        part.write_text(json.dumps(index | {"rows": done}), encoding="utf-8")
    progress(documents, total)
    return documents


def shards_of(folder: Path) -> list[Path]:
    """The shards' files, in order."""
    return sorted(folder.glob("tokens-*.safetensors"))


def rows_done(folder: Path) -> int:
    """Rows of the source that a folder's shards hold or have left out."""
    for path in shards_of(folder)[-1:]:
        with opened(path, ADVICE) as file:
            return int(file.metadata()["rows"])
    return 0


def _index(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The folder's index, which is begun if there is none. Raises CheckpointError if another tokenizer encoded it."""
    path = folder / INDEX
    own = {"tokenizer": hashlib.sha256(repr(tokenizer(_PROBE)["input_ids"]).encode()).hexdigest()[:16]}
    if not path.exists():
        with replacing(path) as part:
            part.write_text(json.dumps(own), encoding="utf-8")
    with naming(path, f"{path} cannot be read", ADVICE):
        index = read_json(path)
    if index.get("tokenizer") != own["tokenizer"]:
        raise CheckpointError(f"{folder} was encoded by another tokenizer: encode the text again for this target.")
    return index
