"""Samples: rows of data files as prompts that can be cut to a length."""

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
"""Treatment of a text below the requested length: leave it out, join the next texts to it, or keep it as it is."""
SamplingScheme = Literal["coupled", "standard"]
"""Acceptance at T > 0: coupled (drafts share the noise of the target's sampling) or standard (rejection sampling)."""


@dataclass(frozen=True)
class Sample:
    """A prompt, as the parts of a data file's row.

    Attributes:
        document: the long text, which is cut to fit.
        instruction: the text after the document; empty if the document is the whole prompt.
        dataset: the row's own ``dataset``, else the file's stem.
        origin: file and line, for messages.
        preface: the text before the document; never cut.
        separator: the text between preface, document and instruction.
        answers: reference answers; any one is right.
        metric: how an answer is scored, one of :data:`longdraft.bench.scores.METRICS`; empty: not scored.
        classes: for classification, the names of all classes.
        no_chat_template: encode as plain text, as LongBench does for its code and few-shot tasks.
        truncate_middle: cut the document in its middle instead of at its end.
        needles: sentences that are inserted after the cut, each with its depth, 0 to 1.
        last_message: for a conversation, the last message as JSON without its content, which is ``instruction``; each
            line of ``document`` is an earlier message as JSON. Empty: no conversation.
        tools: for a conversation, the functions that the model may call, as JSON; empty: none.
        continues_previous: the preceding sample is the previous turn of this conversation.
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
        """The sample with this many characters of its document; a conversation keeps whole messages only."""
        text = self.document
        if self.last_message and characters < len(text):
            # One character more, so that a message that ends exactly at the limit keeps its line break and stays.
            return replace(self, document=text[: characters + 1].rpartition("\n")[0])
        if self.truncate_middle and characters < len(text):
            text = text[: characters - characters // 2] + text[len(text) - characters // 2 :]
        return replace(self, document=text[:characters])

    @property
    def text(self) -> str:
        """The prompt: preface, document with its needles, instruction."""
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
        """Token ids of the prompt as a user's turn or a conversation; with ``raw`` as plain text.

        Args:
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
    """The samples of the first ``limit`` rows of each JSONL file.

    A row has ``text`` (a whole prompt), or ``context`` and ``input`` as in LongBench.

    Raises:
        PromptError: a file is missing, empty or not JSONL, or a row has no text. Names file and line.
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
    """A row's reference answers, from the first of ``columns`` that is present; empty if none is."""
    answers = next((row[column] for column in columns if row.get(column) is not None), ())
    return tuple(map(str, answers)) if isinstance(answers, list | tuple) else (str(answers),)


def read_document(path: Path) -> str:
    """The text of a plain file, or the documents of a JSONL file joined by blank lines.

    Raises:
        PromptError: the file cannot be read.
    """
    if path.suffix == ".jsonl":
        return "\n\n".join(sample.document for sample in read_samples([path]))
    return examples.read_text(path)


def insert_needles(text: str, needles: Iterable[tuple[float, str]]) -> str:
    """Inserts sentences, each at the first end of a sentence (else of a word) behind its depth, 0 to 1."""
    for depth, sentence in sorted(needles, reverse=True):  # deepest first: earlier positions stay
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

    Raises:
        ContextError: the instruction alone is longer.
    """
    token_ids = sample.encode(tokenizer, raw, **kwargs)
    if max_tokens is None or len(token_ids) <= max_tokens:
        return token_ids
    # A binary search for the number of characters; each trial is encoded to count its tokens.
    best: list[int] | None = None
    low, high = 0, len(sample.document)
    while high - low > 1 and len(best or ()) < max_tokens:
        # Until a cut fits, guess from the last trial's characters a token; then halve the interval.
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
