"""Reading training text: rows of JSONL become documents of token ids."""

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
        tokens: the whole text, its end-of-sequence token included where it has one.
        start: the first token that is learned; those before it (a chat's prompt) are context alone.
        kept: where its features lie, if ``longdraft train data`` has written them: folder, passage, answer (-1: the
            passage itself).
        cut: tokens that were left out at its beginning. Features that were kept are the target's, who saw them.
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
    """Rows that were left out, counted by reason."""

    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.reasons.values())

    def __str__(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons.items())) or "none"


def rows(paths: Iterable[Path], skipped: Skipped) -> Iterator[dict[str, Any]]:
    """The JSON objects of JSONL files (``.gz`` and ``.xz`` too). Broken lines are skipped and counted.

    Raises:
        PromptError: a file that is missing or unreadable, naming it.
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

    A row has ``text``; or ``messages``, a chat whose text from the first assistant turn on is learned; or
    ``tokens`` (ids) and ``start``, as ``longdraft train data`` writes them. Rows of none of these kinds, and rows
    that cannot be encoded, are skipped and counted.
    """
    for row, features in ((row, features_of(path)) for path in paths for row in rows([path], skipped)):
        try:
            document = _document(row, tokenizer, features)
        except (KeyError, TypeError, ValueError, AttributeError):
            skipped.add("without usable text, messages or tokens")
            continue
        if not all(0 <= t < vocab_size for t in document.tokens):
            skipped.add("with token ids outside the vocabulary")
            continue
        yield document


def features_of(answers: Path) -> Path:
    """The folder beside a file of answers that holds their features, if there are any."""
    return answers.with_name(f"{answers.name.partition('.')[0]}.features")


def _document(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, features: Path) -> Document:
    if "tokens" in row:
        kept = (str(features), int(row["at"][0]), int(row["at"][1])) if "at" in row and features.is_dir() else None
        return Document([int(t) for t in row["tokens"]], int(row.get("start", 1)), kept)
    if "messages" in row:
        return _chat(row["messages"], tokenizer)
    tokens = encode(tokenizer, row["text"])
    # EOS is learned: a draft that never proposes it costs a verification at every end.
    if tokenizer.eos_token_id is not None:
        tokens = [*tokens, tokenizer.eos_token_id]
    return Document(tokens)


def _chat(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> Document:
    first = next(i for i, m in enumerate([*messages, {"role": "assistant"}]) if m["role"] == "assistant")
    if first == len(messages):
        raise ValueError("no assistant turn")
    render = {"return_dict": False, "tokenizer_kwargs": {"verbose": False}}
    prompt = tokenizer.apply_chat_template(messages[:first], add_generation_prompt=True, **render)
    whole = tokenizer.apply_chat_template(messages, **render)
    if whole[: len(prompt)] != prompt:
        raise ValueError("the chat template does not keep a chat's beginning as it grows")
    return Document(list(whole), len(prompt))


def write(
    found: Iterable[Document | str],
    out: Path,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Writes documents as rows of ``tokens`` and ``start``, texts as rows of ``text``.

    The file appears whole or not at all.

    Args:
        progress: told rows and tokens so far, now and then.
        stop: asked likewise; True ends it, and nothing is written.

    Returns:
        The number of rows.

    Raises:
        CheckpointError: the file cannot be written.
        PromptError: there are no documents.
    """
    part = out.with_name(f".{out.name}.part")
    rows, tokens = 0, 0
    try:
        with part.open("w", encoding="utf-8") as file:
            for rows, one in enumerate(found, 1):
                tokens += 0 if isinstance(one, str) else len(one.tokens)
                row = {"text": one} if isinstance(one, str) else {"tokens": one.tokens, "start": one.start}
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
