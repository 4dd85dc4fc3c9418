"""Training text: rows of JSONL files become documents of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.errors import CheckpointError
from longdraft.model.chat import applied, encode
from longdraft.training import corpora

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Document:
    """Token ids of one text.

    Attributes:
        tokens: the whole text, with its end-of-sequence token if it has one.
        start: the first token that is learned; those before it (a chat's prompt) are only context.
    """

    tokens: list[int]
    start: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.tokens):
            raise ValueError(f"start {self.start} leaves nothing to learn of {len(self.tokens)} tokens")


@dataclass
class Skipped:
    """The rows that were left out, counted by reason."""

    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.reasons.values())

    def __str__(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons.items())) or "none"


def rows(paths: Iterable[Path | str], skipped: Skipped) -> Iterator[dict[str, Any]]:
    """The rows of files, or of corpora by name (:mod:`longdraft.training.corpora`). Broken ones are counted.

    Raises PromptError if a file is missing or cannot be read.
    """
    return (row for row in _all_rows(paths, skipped) if row is not None)


def _all_rows(sources: Iterable[Path | str], skipped: Skipped) -> Iterator[dict[str, Any] | None]:
    """Each row; None for a broken one."""
    for source in sources:
        corpus = corpora.named(source)
        for path in corpus.files:
            for row in corpora.rows(path):
                if isinstance(row, dict):
                    yield corpus.convert(row)
                else:
                    skipped.add("not JSON" if row is None else "not an object")
                    yield None


def documents(
    paths: Iterable[Path | str], tokenizer: PreTrainedTokenizerBase, skipped: Skipped, vocab_size: int
) -> Iterator[Document]:
    """The documents of files, or of corpora by name.

    A row has ``text``; or ``messages``, a chat that is learned from the first assistant turn on; or ``tokens`` (ids)
    and ``start``, as ``longdraft train data`` writes them. Other rows, and rows that cannot be encoded, are skipped and
    counted.
    """
    return filter(None, encoded(paths, tokenizer, skipped, vocab_size))


def encoded(
    paths: Iterable[Path | str],
    tokenizer: PreTrainedTokenizerBase,
    skipped: Skipped,
    vocab_size: int,
    done: int = 0,
) -> Iterator[Document | None]:
    """The document of each row after the first ``done``; None for one that is left out. See :func:`documents`."""
    for row in islice(_all_rows(paths, skipped), done, None):
        if row is None:
            yield None
            continue
        try:
            document = _document(row, tokenizer)
        except (KeyError, TypeError, ValueError, AttributeError):
            skipped.add("without usable text, messages or tokens")
            yield None
            continue
        usable = all(0 <= t < vocab_size for t in document.tokens)
        if not usable:
            skipped.add("with token ids outside the vocabulary")
        yield document if usable else None


def _document(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Document:
    if "tokens" in row:
        return Document([int(t) for t in row["tokens"]], int(row.get("start", 1)))
    if "messages" in row:
        return _chat(row["messages"], tokenizer, bool(row.get("cut")))
    tokens = encode(tokenizer, row["text"])
    # EOS is learned, because a draft that never proposes it costs a verification at the end of every text.
    if tokenizer.eos_token_id is not None:
        tokens = [*tokens, tokenizer.eos_token_id]
    return Document(tokens)


# Marks where an answer was cut off. The space shows whether a template trims answers.
_CUT = "-*-cut-*- "


def _chat(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, cut: bool) -> Document:
    """A chat; ``cut``: its last answer was cut off, so its end is not learned."""
    first = [m["role"] for m in messages].index("assistant")  # ValueError if there is none
    last = {**messages[-1], "content": messages[-1]["content"] + _CUT * cut}
    text = applied(tokenizer, [*messages[:-1], last], add_generation_prompt=False)
    if cut:
        text, mark, behind = text.rpartition(_CUT.strip())
        if not mark:
            raise ValueError("the chat template does not show the last answer")
        text = text if behind.startswith(" ") else text.rstrip()  # the template trims
    texts = (applied(tokenizer, messages[:first]), text)
    prompt, tokens = (tokenizer(each, add_special_tokens=False, verbose=False)["input_ids"] for each in texts)
    if tokens[: len(prompt)] != prompt:
        raise ValueError("the chat template does not keep a chat's beginning as it grows")
    return Document(list(tokens), len(prompt))


def write(texts: Iterable[str], out: Path) -> int:
    """Writes rows of ``text``; returns how many. The file appears whole or not at all.

    Raises:
        CheckpointError: the file cannot be written.
        PromptError: there are no texts to make rows of.
    """
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    part = out.with_name(f".{out.name}.part")
    try:
        part.write_text("".join(lines), encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}.") from error
    finally:
        part.unlink(missing_ok=True)
    return len(lines)
