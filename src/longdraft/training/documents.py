"""Training text: rows of JSONL files become documents of token ids."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.files import replacing
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


class Skipped(Counter[str]):
    """The rows that were left out, counted by reason."""

    def __str__(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.items())) or "none"


def rows(sources: Iterable[Path | str], skipped: Skipped) -> Iterator[dict[str, Any] | None]:
    """Each row of files, or of corpora by name (:mod:`longdraft.training.corpora`); None for a broken one.

    Raises PromptError if a file is missing or cannot be read.
    """
    for row in chain.from_iterable(map(corpora.rows, sources)):
        if not isinstance(row, dict):
            skipped["not JSON" if row is None else "not an object"] += 1
            row = None
        yield row


def documents(
    sources: Iterable[Path | str],
    tokenizer: PreTrainedTokenizerBase,
    skipped: Skipped,
    vocab_size: int,
    done: int = 0,
) -> Iterator[Document | None]:
    """The document of each row after the first ``done``; None for one that is left out, and counted.

    A row has ``text``; or ``messages``, a chat that is learned from the first assistant turn on; or ``tokens`` (ids)
    and ``start``, as ``longdraft train data`` writes them.
    """
    for row in islice(rows(sources, skipped), done, None):
        document = None
        if row is not None:
            try:
                document = _document(row, tokenizer)
            except (KeyError, TypeError, ValueError, AttributeError):
                skipped["without usable text, messages or tokens"] += 1
        if document is not None and not all(0 <= t < vocab_size for t in document.tokens):
            skipped["with token ids outside the vocabulary"] += 1
            document = None
        yield document


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
    with replacing(out) as part:
        part.write_text("".join(lines), encoding="utf-8")
    return len(lines)
