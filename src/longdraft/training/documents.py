"""Training text: rows of JSONL files become documents of token ids."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from longdraft.errors import CheckpointError, LongdraftError, PromptError
from longdraft.model.chat import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENERS: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}


@dataclass(frozen=True)
class Document:
    """Token ids of one text.

    Attributes:
        tokens: the whole text, with its end-of-sequence token if it has one.
        start: the first token that is learned; those before it (a chat's prompt) are only context.
        kept: place of its features if ``longdraft train data`` has kept them: folder, passage, answer (-1: the passage
            itself).
        cut: tokens that were cut off at its beginning. The target saw them when it computed kept features.
    """

    tokens: list[int]
    start: int = 1
    kept: tuple[str, int, int] | None = None
    cut: int = 0

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


def rows(paths: Iterable[Path], skipped: Skipped) -> Iterator[dict[str, Any]]:
    """The JSON objects of JSONL files (also ``.gz`` and ``.xz``). Broken lines are skipped and counted.

    Raises PromptError if a file is missing or cannot be read.
    """
    for path in paths:
        try:
            with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if not line.strip():
                        continue
                    try:
                        row = json.loads(line)
                    except ValueError:
                        skipped.add("not JSON")
                        continue
                    if isinstance(row, dict):
                        yield row
                    else:
                        skipped.add("not an object")
        except FileNotFoundError:
            raise PromptError(f"There is no file {path}: check the path.") from None
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise PromptError(f"{path} cannot be read ({error}): is it a whole JSONL, .gz or .xz file?") from None


def documents(
    paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase, skipped: Skipped, vocab_size: int
) -> Iterator[Document]:
    """The documents of JSONL files.

    A row has ``text``; or ``messages``, a chat that is learned from the first assistant turn on; or ``tokens`` (ids)
    and ``start``, as ``longdraft train data`` writes them. Other rows, and rows that cannot be encoded, are skipped and
    counted.
    """
    for path in paths:
        for row in rows([path], skipped):
            try:
                document = _document(row, tokenizer, features_of(path))
            except (KeyError, TypeError, ValueError, AttributeError):
                skipped.add("without usable text, messages or tokens")
                continue
            if all(0 <= t < vocab_size for t in document.tokens):
                yield document
            else:
                skipped.add("with token ids outside the vocabulary")


def features_of(answers: Path) -> Path:
    """The folder beside a file of answers for their features."""
    return answers.with_name(f"{answers.name.partition('.')[0]}.features")


def _document(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, features: Path) -> Document:
    if "tokens" in row:
        kept = (str(features), int(row["at"][0]), int(row["at"][1])) if "at" in row and features.is_dir() else None
        return Document([int(t) for t in row["tokens"]], int(row.get("start", 1)), kept)
    if "messages" in row:
        return _chat(row["messages"], tokenizer)
    tokens = encode(tokenizer, row["text"])
    # EOS is learned, because a draft that never proposes it costs a verification at the end of every text.
    if tokenizer.eos_token_id is not None:
        tokens = [*tokens, tokenizer.eos_token_id]
    return Document(tokens)


def _chat(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> Document:
    first = [m["role"] for m in messages].index("assistant")  # ValueError if there is none
    render = {"return_dict": False, "tokenizer_kwargs": {"verbose": False}}
    prompt = tokenizer.apply_chat_template(messages[:first], add_generation_prompt=True, **render)
    tokens = tokenizer.apply_chat_template(messages, **render)
    if tokens[: len(prompt)] != prompt:
        raise ValueError("the chat template does not keep a chat's beginning as it grows")
    return Document(list(tokens), len(prompt))


def write(
    texts: Iterable[Document | str],
    out: Path,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Writes documents as rows of ``tokens`` and ``start``, strings as rows of ``text``; returns the number of rows.

    The file appears whole or not at all.

    Args:
        progress: called now and then with the rows and tokens so far.
        stop: called as often; True ends the work, and nothing is written.

    Raises:
        CheckpointError: the file cannot be written.
        PromptError: there are no documents.
    """
    part = out.with_name(f".{out.name}.part")
    rows, tokens = 0, 0
    try:
        with part.open("w", encoding="utf-8") as file:
            for rows, text in enumerate(texts, 1):
                tokens += 0 if isinstance(text, str) else len(text.tokens)
                row = {"text": text} if isinstance(text, str) else {"tokens": text.tokens, "start": text.start}
                file.write(json.dumps(row) + "\n")
                if rows % 100 == 0:
                    progress(rows, tokens)
                    if stop():
                        return rows
        if not rows:
            raise PromptError("There is nothing to write: rows need `text`, `messages` or `tokens`.")
        part.replace(out)
    except LongdraftError:
        raise
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}.") from error
    finally:
        part.unlink(missing_ok=True)
    progress(rows, tokens)
    return rows
