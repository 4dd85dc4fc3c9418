"""Training text: rows of files become documents of token ids.

A source is a file, or a folder such as a corpus as its authors publish it: all files below it that may hold text are
read, in order of their paths.
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

from longdraft.errors import CapabilityError, PromptError
from longdraft.model.chat import encode
from longdraft.training.chats import chat_messages, encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Example = dict[str, Any]
# What the names of files in a folder end with.
FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".json", ".parquet", ".txt")


@dataclass(frozen=True)
class Document:
    """Token ids of one text.

    Attributes:
        token_ids: the whole text, with its end-of-sequence token if it has one.
        start: the first token that is learned; those before it (a chat's prompt) are only context.
        loss_mask: of each token, whether it is learned; None: all are from ``start`` on.
    """

    token_ids: list[int]
    start: int = 1
    loss_mask: list[bool] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.token_ids):
            raise ValueError(f"with nothing to learn (start {self.start} of {len(self.token_ids)} tokens)")


class SkipCounts(Counter[str]):
    """The rows that were left out, counted by reason."""

    def __str__(self) -> str:
        said = [f"{count} {reason}" for reason, count in self.most_common(8)]
        more = sum(self.values()) - sum(count for _, count in self.most_common(8))
        return ", ".join([*said, *([f"{more} for other reasons"] if more else [])]) or "none"


def encode_documents(
    sources: Iterable[Path | str],
    tokenizer: PreTrainedTokenizerBase,
    skipped: SkipCounts,
    vocab_size: int,
    num_done: int = 0,
    template: Mapping[str, Any] | None = None,
) -> Iterator[Document | None]:
    """The document of each row after the first ``num_done``; None for one that is left out, and counted.

    A row has ``token_ids`` (ids) and ``start``; or ``text``; or a chat, whose answers are learned
    (:func:`longdraft.training.chats.messages_of`), with its ``tools`` and ``chat_template_kwargs`` if it has them.

    Args:
        template: further arguments of the chat template; a row's own come first.
    """
    for row in islice(read_examples(sources, skipped), num_done, None):
        document = None
        if row is not None:
            try:
                document = _document(row, tokenizer, template)
            except PromptError as error:
                skipped[f"that cannot be encoded ({str(error)[:200]})"] += 1
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                why = str(error) if type(error) is ValueError else "with text, messages or tokens of another form"
                skipped[f"{why} (keys: {', '.join(map(str, row))})"] += 1
        if document is not None and not all(0 <= t < vocab_size for t in document.token_ids):
            skipped["with token ids outside the vocabulary"] += 1
            document = None
        yield document


def _document(row: Example, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None) -> Document:
    row = {key: value for key, value in row.items() if value is not None}
    if "tokens" in row:
        return Document([int(t) for t in row["tokens"]], int(row.get("start", 1)))
    messages = chat_messages(row)
    if messages is not None:
        tools, own = row.get("tools"), row.get("chat_template_kwargs")
        tools, own = (json.loads(each) if isinstance(each, str) else each for each in (tools, own))
        settings = {**(template or {}), **(own or {})}
        tokens, learned = encode_chat(messages, tokenizer, tools or None, settings, bool(row.get("cut")))
        if not any(learned):
            raise ValueError("whose answers are no tokens")
        start, end = learned.index(True), len(learned) - learned[::-1].index(True)
        learned = learned[:end]
        return Document(tokens[:end], start, None if all(learned[start:]) else learned)
    if "text" in row:
        tokens = encode(tokenizer, row["text"])
        # EOS is learned, because a draft that never proposes it costs a verification at the end of every text.
        return Document(tokens if tokenizer.eos_token_id is None else [*tokens, tokenizer.eos_token_id])
    raise ValueError("with neither text, messages nor tokens")


def read_examples(sources: Iterable[Path | str], skipped: SkipCounts) -> Iterator[Example | None]:
    """Each row of files and folders; None for one that is no JSON object, and counted. ``.txt`` is one row.

    Raises:
        PromptError: a source is missing, has nothing that is read, or cannot be read.
        CapabilityError: its format needs a package that is not installed.
    """
    for source in map(Path, sources):
        files = [source]
        if source.is_dir():
            files = sorted(path for path in source.rglob("*") if path.name.endswith(FILE_SUFFIXES) and path.is_file())
        if not files or not files[0].exists():
            ends = ", ".join(FILE_SUFFIXES)
            raise PromptError(f"There is no file {source}, or no text in it ({ends}). A corpus goes by its folder.")
        for path in files:
            try:
                for row in _read(path):
                    if not isinstance(row, dict):
                        skipped["not JSON" if row is None else "not an object"] += 1
                    yield row if isinstance(row, dict) else None
            except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
                raise PromptError(f"{path} cannot be read ({error}): is it whole, and what its name says?") from None


def _read(path: Path) -> Iterator[Any]:
    """The rows of a file; None for a line that is not JSON."""
    if path.suffix == ".txt":
        yield {"text": path.read_text(encoding="utf-8", errors="replace")}
    elif path.suffix == ".json":
        yield from json.loads(path.read_text(encoding="utf-8"))
    elif path.suffix == ".parquet":
        for batch in _arrow(path).parquet.ParquetFile(path).iter_batches(256):
            yield from batch.to_pylist()
    else:
        zst = partial(_arrow(path).input_stream, compression="zstd") if path.suffix == ".zst" else None
        packed: Any = zst or {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, partial(open, mode="rb"))
        with io.TextIOWrapper(packed(path), "utf-8", "replace") as lines:
            for line in filter(str.strip, lines):
                try:
                    yield json.loads(line)
                except ValueError:
                    yield None


def _arrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CapabilityError(f'{path} needs the package pyarrow: pip install "longdraft[data]".') from None
    return pyarrow
