"""Reading data files and turning their rows into prompts of a chosen length."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.errors import ContextError, PromptError
from longdraft.model.chat import chat_prompt, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """One row of a data file.

    Attributes:
        document: the long text, which is cut to fit.
        instruction: the text behind it; empty if the row is one whole prompt.
        dataset: the row's own ``dataset``, else the file's stem.
        origin: file and line, for messages.
        preface: the text before the document; never cut.
    """

    document: str
    instruction: str
    dataset: str
    origin: str
    preface: str = ""

    def encode(self, tokenizer: PreTrainedTokenizerBase, raw: bool = False) -> list[int]:
        """Token ids: one user turn of a chat, or plain text with ``raw``."""
        document = "\n\n".join(part for part in (self.preface, self.document) if part)
        if raw:
            return encode(tokenizer, "\n\n".join(part for part in (document, self.instruction) if part))
        return chat_prompt(tokenizer, self.instruction, document=document)


def read(paths: Iterable[Path], limit: int | None = None) -> list[Sample]:
    """The rows of JSONL files, the first ``limit`` of each.

    A row has ``text`` (a whole prompt), or ``context`` and ``input`` as LongBench's rows have.

    Raises:
        PromptError: a file that is missing, empty or not JSONL; a row without text. File and line are named.
    """
    return [_sample(row, path, origin) for path in paths for row, origin in rows(path, limit)]


def rows(path: Path, limit: int | None = None) -> list[tuple[dict[str, Any], str]]:
    """The first ``limit`` rows of a JSONL file, with the file and line of each.

    Raises:
        PromptError: as in :func:`read`.
    """
    if path.is_dir():
        raise PromptError(f"{path} is a folder: --data takes a JSONL file.")
    try:
        with path.open(encoding="utf-8") as lines:
            found = list(islice(_objects(lines, path), limit))
    except FileNotFoundError:
        raise PromptError(f"There is no file {path}: check the path.") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text ({error.reason}): --data takes a JSONL file.") from None
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}.") from None
    if not found:
        raise PromptError(f"{path} has no rows.")
    return found


def _objects(lines: Iterable[str], path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        origin = f"{path}:{number}"
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise PromptError(f"{origin} is not JSON ({error}): each line holds one object.") from None
        if not isinstance(row, dict):
            raise PromptError(f"{origin} holds {type(row).__name__}, not an object.")
        yield row, origin


def _sample(row: dict[str, Any], path: Path, origin: str) -> Sample:
    if "text" in row:
        document, instruction = row["text"], ""
    elif "context" in row:
        document, instruction = row["context"], row.get("input") or ""
    else:
        raise PromptError(
            f"{origin} has neither `text` nor `context` and `input`; it has {', '.join(row) or 'nothing'}."
        )
    if not isinstance(document, str) or not isinstance(instruction, str) or not document.strip():
        raise PromptError(f"{origin}: its text is empty or not a string.")
    return Sample(document, instruction, str(row.get("dataset") or path.stem), origin)


def fitted(sample: Sample, tokenizer: PreTrainedTokenizerBase, tokens: int | None, raw: bool = False) -> list[int]:
    """The sample's prompt, its document cut at the end so that the whole has at most ``tokens`` tokens.

    Raises:
        ContextError: the instruction alone is longer.
    """
    ids = sample.encode(tokenizer, raw)
    if tokens is None or len(ids) <= tokens:
        return ids
    # The text is cut in characters, and encoded to count its tokens.
    best: list[int] | None = None
    low, high = 0, len(sample.document)
    while high - low > 1 and len(best or ()) < tokens:
        # The first guess assumes the same density throughout; then the interval is halved.
        middle = (low + high) // 2 if best else max(low + 1, min(high - 1, high * tokens // max(1, len(ids))))
        cut = sample.document[:middle]
        ids = replace(sample, document=cut).encode(tokenizer, raw) if cut.strip() else []
        if len(ids) <= tokens:
            low, best = middle, ids or best
        else:
            high = middle
    if not best:
        raise ContextError(f"{sample.origin}: not even the instruction fits {tokens} tokens. Ask for a longer context.")
    return best
