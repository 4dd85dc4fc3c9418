"""Makes samples from the rows of data files. A sample is a prompt that can be cut to a length."""

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
"""What to do with a text below the requested length: leave it out, join the next texts to it, or keep it as it is."""
SamplingScheme = Literal["coupled", "standard"]
"""Acceptance at T > 0. coupled: draft and target sample with the same random numbers; standard: rejection sampling."""


@dataclass(frozen=True)
class Sample:
    """The parts of a prompt, made from a row of a data file.

    Attributes:
        document: the long text, which is cut to fit.
        instruction: the text after the document; empty if the document is the whole prompt.
        dataset: the row's own ``dataset``, else the file's name without its suffix.
        origin: file and line, for error messages.
        preface: the text before the document; never cut.
        separator: the text between preface, document and instruction.
        answers: reference answers; any one is right.
        metric: how an answer is scored, one of :data:`longdraft.bench.scores.METRICS`; empty: not scored.
        classes: for classification, the names of all classes.
        no_chat_template: encode as plain text, as LongBench does for its code and few-shot tasks.
        truncate_middle: cut the document in its middle instead of at its end.
        needles: sentences that are inserted after the cut, each with its depth, 0 to 1.
        last_message: the last message of a conversation as JSON, without its content; empty: no conversation. The
            content is ``instruction``. Each line of ``document`` is an earlier message as JSON.
        tools: for a conversation, the functions that the model may call, as JSON; empty: none.
        continues_previous: the preceding sample is the previous turn of the same conversation.
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
        """Returns the sample with a document of at most this many characters; a conversation keeps whole messages."""
        document = self.document
        if self.last_message and characters < len(document):
            # A message that ends exactly at the limit stays: its line break is the one character more.
            return replace(self, document=document[: characters + 1].rpartition("\n")[0])
        if self.truncate_middle and characters < len(document):
            document = document[: characters - characters // 2] + document[len(document) - characters // 2 :]
        return replace(self, document=document[:characters])

    @property
    def text(self) -> str:
        """The prompt as plain text: preface, document with the needles, instruction."""
        if self.last_message:
            return "\n\n".join(message["content"] for message in self.messages)
        parts = self.preface, insert_needles(self.document, self.needles), self.instruction
        return self.separator.join(part for part in parts if part)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of a conversation, the last one included."""
        earlier = [json.loads(line) for line in self.document.splitlines()]
        return [*earlier, json.loads(self.last_message) | {"content": self.instruction}]

    def encode(self, tokenizer: PreTrainedTokenizerBase, raw: bool = False, **template_kwargs: Any) -> list[int]:
        """Returns the prompt's token ids: in the chat template, as a user's message or as the sample's conversation.

        Args:
            raw: encode the plain text, without the chat template.
            template_kwargs: ``system``, and arguments of the chat template.
        """
        if raw or self.no_chat_template:
            return encode(tokenizer, self.text)
        if not self.last_message:
            return chat_prompt(tokenizer, self.text, **template_kwargs)
        messages, system = self.messages, template_kwargs.pop("system", None)
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return encode_conversation(tokenizer, messages, tools=json.loads(self.tools or "null"), **template_kwargs)


def read_samples(paths: Iterable[Path], limit: int | None = None) -> list[Sample]:
    """Makes a sample of each of the first ``limit`` rows of each JSONL file.

    A row has ``text`` (a whole prompt), or ``context`` and ``input`` as in LongBench.

    Raises:
        PromptError: a file is missing, empty or not JSONL, or a row has no text. The message names file and line.
    """
    return [_make_sample(example, path) for path in paths for example in examples.read_jsonl(path, limit)]


def _make_sample(example: Example, path: Path) -> Sample:
    columns, origin = example.columns, example.origin
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
    metric = scores.metric_of_dataset(dataset) if answers else ""
    classes = tuple(columns.get("all_classes") or ())
    return Sample(document, instruction, dataset, origin, answers=answers, metric=metric, classes=classes)


def reference_answers(row: Mapping[str, Any], *columns: str) -> tuple[str, ...]:
    """Returns a row's reference answers, from the first of ``columns`` that the row has; empty if it has none."""
    answers = next((row[column] for column in columns if row.get(column) is not None), ())
    return tuple(map(str, answers)) if isinstance(answers, list | tuple) else (str(answers),)


def read_document(path: Path) -> str:
    """Returns the text of a plain file, or the documents of a JSONL file, joined by blank lines.

    Raises:
        PromptError: the file cannot be read.
    """
    if path.suffix == ".jsonl":
        return "\n\n".join(sample.document for sample in read_samples([path]))
    return examples.read_text(path)


def insert_needles(text: str, needles: Iterable[tuple[float, str]]) -> str:
    """Inserts needles (depth, sentence), depth from 0 to 1: each at the next end of a sentence, else of a word."""
    for depth, sentence in sorted(needles, reverse=True):  # deepest first: positions before it do not move
        position = round(depth * len(text))
        boundary = re.compile(r"[.!?]\s|\n").search(text, position) or re.compile(r"\s").search(text, position)
        position = boundary.end() if boundary else len(text)
        before, after = text[:position].rstrip(" "), text[position:].lstrip(" ")
        text = " ".join(part for part in (before, sentence, after) if part)
    return text


def encode_truncated(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None, raw: bool = False, **kwargs: Any
) -> list[int]:
    """Cuts the document until the prompt has at most ``max_tokens`` tokens (None: uncut). Returns the token ids.

    Args:
        raw, kwargs: see :meth:`Sample.encode`.

    Raises:
        ContextError: the instruction alone exceeds ``max_tokens``.
    """
    token_ids = sample.encode(tokenizer, raw, **kwargs)
    if max_tokens is None or len(token_ids) <= max_tokens:
        return token_ids
    # A binary search for the number of characters. Each trial is encoded to count its tokens.
    best: list[int] | None = None  # the longest prompt so far that fits
    low, high = 0, len(sample.document)
    while high - low > 1 and len(best or ()) < max_tokens:
        # Until a trial fits, guess by the characters per token of the last trial; then halve the interval.
        guess = max(low + 1, min(high - 1, high * max_tokens // max(1, len(token_ids))))
        characters = (low + high) // 2 if best else guess
        trial = sample.truncated(characters)
        token_ids = trial.encode(tokenizer, raw, **kwargs) if trial.document.strip() else []
        if len(token_ids) <= max_tokens:
            low, best = characters, token_ids or best
        else:
            high = characters
    if not best:
        raise ContextError(f"{sample.origin}: the instruction alone exceeds {max_tokens} tokens: ask for more context.")
    return best
