"""Reads training data: rows of files become documents of token ids.

A source is a file or a folder, such as a downloaded corpus. In a folder and its subfolders, all files that end with one
of :data:`FILE_SUFFIXES` are read, in the order of their paths.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.engine.chat import encode
from longdraft.errors import PromptError, needs_extra
from longdraft.training.chats import chat_messages, encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A row of a file, as JSON.
Example = dict[str, Any]
FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".json", ".parquet", ".txt")


@dataclass(frozen=True)
class Document:
    """The token ids of one text or chat."""

    token_ids: list[int]  # all tokens, end of sequence included
    start: int = 1  # index of the first token that counts in the loss; tokens before it (a chat's prompt) are context
    loss_mask: list[bool] | None = None  # for each token, whether it counts in the loss; None: all from ``start`` on do

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.token_ids):
            raise ValueError(f"with nothing to learn (start {self.start} of {len(self.token_ids)} tokens)")


class SkipCounts(Counter[str]):
    """Counts the rows that were left out, by reason. A reason follows a number, as in "3 without text"."""

    def __str__(self) -> str:
        most_common = self.most_common(8)
        reasons = [f"{count} {reason}" for reason, count in most_common]
        others = sum(self.values()) - sum(count for _, count in most_common)
        return ", ".join([*reasons, *([f"{others} for other reasons"] if others else [])]) or "none"


def encode_documents(
    sources: Iterable[Path | str], tokenizer: PreTrainedTokenizerBase, skipped: SkipCounts, vocab_size: int,
    num_done: int = 0, template: Mapping[str, Any] | None = None,
) -> Iterator[Document | None]:  # fmt: skip
    """Yields the document of each row after the first ``num_done``; None for a row that is left out and counted.

    A row has ``tokens`` (ids) and ``start``, or ``text``, or a chat (:func:`~longdraft.training.chats.chat_messages`)
    with ``tools`` and ``chat_template_kwargs``. The answers of a chat count in the loss.

    Args:
        sources: files and folders; see :func:`read_examples`.
        skipped: counts the rows that are left out.
        vocab_size: size of the target's vocabulary. Rows with larger token ids are left out.
        num_done: number of rows to skip, which an earlier run encoded.
        template: arguments of the chat template; the ``chat_template_kwargs`` of a row take precedence.
    """
    for example in islice(read_examples(sources, skipped), num_done, None):
        document = None
        if example is not None:
            try:
                document = _encode(example, tokenizer, template)
            except PromptError as error:
                skipped[f"that cannot be encoded ({str(error)[:200]})"] += 1
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                # Our own errors are plain ValueErrors. Others come from rows of another form.
                why = str(error) if type(error) is ValueError else "with text, messages or tokens of another form"
                skipped[f"{why} (keys: {', '.join(map(str, example))})"] += 1
        if document is not None and not all(0 <= t < vocab_size for t in document.token_ids):
            skipped["with token ids outside the vocabulary"] += 1
            document = None
        yield document


def _encode(
    example: Example, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None
) -> Document:
    """Encodes a row. The message of a ValueError says why the row is left out."""
    example = {key: value for key, value in example.items() if value is not None}
    if "tokens" in example:
        return Document([int(t) for t in example["tokens"]], int(example.get("start", 1)))
    messages = chat_messages(example)
    if messages is not None:
        fields = example.get("tools"), example.get("chat_template_kwargs")
        tools, kwargs = (json.loads(field) if isinstance(field, str) else field for field in fields)
        kwargs = {**(template or {}), **(kwargs or {})}
        ids, mask = encode_chat(messages, tokenizer, tools or None, kwargs, bool(example.get("cut")))
        if not any(mask):
            raise ValueError("whose answers have no tokens")
        start, end = mask.index(True), len(mask) - mask[::-1].index(True)
        return Document(ids[:end], start, None if all(mask[start:end]) else mask[:end])
    if "text" in example:
        tokens = encode(tokenizer, example["text"])
        # EOS counts in the loss: without it, a draft never proposes EOS, and the end of every text costs a forward.
        return Document(tokens if tokenizer.eos_token_id is None else [*tokens, tokenizer.eos_token_id])
    raise ValueError("with neither text, messages nor tokens")


def read_examples(sources: Iterable[Path | str], skipped: SkipCounts) -> Iterator[Example | None]:
    """Yields the rows of files and folders; None for a row that is not a JSON object. A ``.txt`` file is one row.

    Raises PromptError if a source has no readable file, CapabilityError if a format needs a package that is missing.
    """
    for source in map(Path, sources):
        files = [source]
        if source.is_dir():
            files = sorted(path for path in source.rglob("*") if path.name.endswith(FILE_SUFFIXES) and path.is_file())
        if not files or not files[0].exists():
            suffixes = ", ".join(FILE_SUFFIXES)
            raise PromptError(f"There is no file {source}, or no text in it ({suffixes}). Name a file or a folder.")
        for path in files:
            try:
                for example in _read_rows(path):
                    if not isinstance(example, dict):
                        skipped["not JSON" if example is None else "not an object"] += 1
                    yield example if isinstance(example, dict) else None
            except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
                raise PromptError(f"{path} cannot be read ({error}): check the file and its format.") from None


def _read_rows(path: Path) -> Iterator[Any]:
    """Yields the rows of a file; None for a line that is not JSON."""
    if path.suffix == ".txt":
        yield {"text": path.read_text(encoding="utf-8", errors="replace")}
    elif path.suffix == ".json":
        yield from json.loads(path.read_text(encoding="utf-8"))
    elif path.suffix == ".parquet":
        for batch in _import_pyarrow(path).parquet.ParquetFile(path).iter_batches(256):  # rows in memory at once
            yield from batch.to_pylist()
    else:
        zst = partial(_import_pyarrow(path).input_stream, compression="zstd") if path.suffix == ".zst" else None
        open_binary: Any = zst or {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, partial(open, mode="rb"))
        with io.TextIOWrapper(open_binary(path), "utf-8", "replace") as lines:
            for line in filter(str.strip, lines):
                try:
                    yield json.loads(line)
                except ValueError:
                    yield None


def _import_pyarrow(path: Path) -> Any:
    """Returns the package pyarrow. Raises CapabilityError, which names ``path``, if the package is missing."""
    with needs_extra("data", f"{path} needs the package pyarrow"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow
