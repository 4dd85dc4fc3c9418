"""Reading data files and turning their rows into prompts of a chosen length."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longdraft.bench import examples, scores
from longdraft.bench.examples import Example
from longdraft.errors import ContextError, PromptError
from longdraft.model.chat import chat_prompt, encode, encode_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ShortTextPolicy = Literal["leave", "join", "keep"]
"""Handling of a text that is shorter than a length: leave it out, join the next ones to it, or keep it as it is."""
SamplingScheme = Literal["coupled", "standard"]
"""Acceptance of sampled text: coupled (drafts share the noise of the target's draw) or standard (rejection)."""


@dataclass(frozen=True)
class Sample:
    """One row of a data file.

    Attributes:
        document: the long text, which is cut to fit.
        instruction: the text behind it; empty if the row is one whole prompt.
        dataset: the row's own ``dataset``, else the file's stem.
        origin: file and line, for messages.
        preface: the text before the document; never cut.
        separator: what stands between preface, document and instruction.
        answers: references, any of which is right.
        metric: how an answer is scored, one of :data:`longdraft.bench.scores.SCORES`; empty: not at all.
        classes: where the answer is one of several classes, all of them.
        no_chat_template: never in a chat template, as LongBench asks for code and few-shot tasks.
        truncate_middle: a document that is too long loses its middle instead of its end.
        needles: depth, 0 to 1, and text of sentences that stand in the document however it is cut.
        last_message: of a conversation, the last message as JSON; its content is the instruction, and each line of the document
            is an earlier message.
        tools: of a conversation, the functions that may be called, as JSON; empty: none.
        continues_previous: it begins with the conversation of the sample before it.
    """

    document: str
    instruction: str
    dataset: str
    origin: str
    preface: str = ""
    separator: str = "\n\n"
    answers: tuple[str, ...] = ()
    metric: str = ""
    classes: tuple[str, ...] = ()
    no_chat_template: bool = False
    truncate_middle: bool = False
    needles: tuple[tuple[float, str], ...] = ()
    last_message: str = ""
    tools: str = ""
    continues_previous: bool = False

    def truncated(self, characters: int) -> Sample:
        """The sample with so many characters of its document; of a conversation, with the whole messages in them."""
        text = self.document
        if self.last_message and characters < len(text):
            return replace(self, document=text[: characters + 1].rpartition("\n")[0])
        if self.truncate_middle and characters < len(text):
            text = text[: characters - characters // 2] + text[len(text) - characters // 2 :]
        return replace(self, document=text[:characters])

    @property
    def text(self) -> str:
        """The whole prompt: preface, document with its needles, instruction."""
        if self.last_message:
            return "\n\n".join(message["content"] for message in self.messages)
        parts = self.preface, insert_needles(self.document, self.needles), self.instruction
        return self.separator.join(part for part in parts if part)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A conversation's messages."""
        earlier = [json.loads(line) for line in self.document.splitlines()]
        return [*earlier, json.loads(self.last_message) | {"content": self.instruction}]

    def encode(self, tokenizer: PreTrainedTokenizerBase, raw: bool = False, **asked: Any) -> list[int]:
        """Token ids: one user turn of a chat, a conversation, or plain text with ``raw``.

        Args:
            asked: of :func:`longdraft.model.chat.chat_prompt`: ``system``, and arguments of the chat template.
        """
        if raw or self.no_chat_template:
            return encode(tokenizer, self.text)
        if not self.last_message:
            return chat_prompt(tokenizer, self.text, **asked)
        messages, system = self.messages, asked.pop("system", None)
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return encode_conversation(tokenizer, messages, tools=json.loads(self.tools or "null"), **asked)


def read_samples(paths: Iterable[Path], limit: int | None = None) -> list[Sample]:
    """The rows of JSONL files, the first ``limit`` of each.

    A row has ``read_document`` (a whole prompt), or ``context`` and ``input`` as LongBench's rows have.

    Raises:
        PromptError: a file that is missing, empty or not JSONL; a row without text. File and line are named.
    """
    return [_sample(row, path) for path in paths for row in examples.read_jsonl(path, limit)]


def _sample(row: Example, path: Path) -> Sample:
    columns, origin = row.columns, row.origin
    if "text" in columns:
        document, instruction = columns["text"], ""
    elif "context" in columns:
        document, instruction = columns["context"], columns.get("input") or ""
    else:
        raise PromptError(
            f"{origin} has neither `text` nor `context` and `input`; it has {', '.join(columns) or 'nothing'}."
        )
    if not isinstance(document, str) or not isinstance(instruction, str) or not document.strip():
        raise PromptError(f"{origin}: its text is empty or not a string.")
    dataset = str(columns.get("dataset") or path.stem)
    answers = reference_answers(columns, "answers", "answer")
    score = scores.metric_of_dataset(dataset) if answers else ""
    classes = tuple(columns.get("all_classes") or ())
    return Sample(document, instruction, dataset, origin, answers=answers, metric=score, classes=classes)


def reference_answers(row: Mapping[str, Any], *columns: str) -> tuple[str, ...]:
    """The references of a row, from the first of these columns that it has; empty if it has none."""
    found = next((row[column] for column in columns if row.get(column) is not None), ())
    return tuple(map(str, found)) if isinstance(found, list | tuple) else (str(found),)


def read_document(path: Path) -> str:
    """The text of a file: plain, or the documents of JSONL rows one behind the other.

    Raises:
        PromptError: it cannot be read.
    """
    if path.suffix == ".jsonl":
        return "\n\n".join(sample.document for sample in read_samples([path]))
    return examples.read_text(path)


def insert_needles(text: str, needles: Iterable[tuple[float, str]]) -> str:
    """The text with sentences put in: each at the first end of a sentence, else of a word, from its depth on."""
    for depth, sentence in sorted(needles, reverse=True):
        at = round(depth * len(text))
        border = re.compile(r"[.!?]\s|\n").search(text, at) or re.compile(r"\s").search(text, at)
        at = border.end() if border else len(text)
        before, after = text[:at].rstrip(" "), text[at:].lstrip(" ")
        text = " ".join(part for part in (before, sentence, after) if part)
    return text


def encode_truncated(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None, raw: bool = False, **asked: Any
) -> list[int]:
    """The sample's prompt, its document cut so that the whole has at most ``max_tokens`` tokens.

    Args:
        raw, asked: of :meth:`Sample.encode`.

    Raises:
        ContextError: the instruction alone is longer.
    """
    ids = sample.encode(tokenizer, raw, **asked)
    if max_tokens is None or len(ids) <= max_tokens:
        return ids
    # The text is cut in characters, and encoded to count its tokens.
    best: list[int] | None = None
    low, high = 0, len(sample.document)
    while high - low > 1 and len(best or ()) < max_tokens:
        # The first guess assumes the same density throughout; then the interval is halved.
        middle = (low + high) // 2 if best else max(low + 1, min(high - 1, high * max_tokens // max(1, len(ids))))
        cut = sample.truncated(middle)
        ids = cut.encode(tokenizer, raw, **asked) if cut.document.strip() else []
        if len(ids) <= max_tokens:
            low, best = middle, ids or best
        else:
            high = middle
    if not best:
        raise ContextError(
            f"{sample.origin}: not even the instruction fits {max_tokens} tokens. Ask for a longer context."
        )
    return best
