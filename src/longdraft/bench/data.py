"""A sample: a prompt that can be cut to a length, and how an answer to it is scored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from longdraft.engine.chat import chat_prompt, encode, encode_conversation
from longdraft.errors import ContextError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ShortTextPolicy = Literal["leave", "join", "keep"]
"""What to do with a text below the requested length: leave it out, join the next texts to it, or keep it as it is."""
SamplingScheme = Literal["coupled", "standard"]
"""Acceptance at T > 0. coupled: draft and target sample with the same random numbers; standard: rejection sampling."""


@dataclass(frozen=True)
class Sample:
    """The parts of a prompt, made from a row of a data file."""

    document: str  # the long text, which is cut to fit; empty for a conversation
    instruction: str  # the text after the document; empty if the document is the whole prompt
    dataset: str  # the row's own ``dataset``, else the file's name without its suffix
    origin: str  # file and line, for error messages
    preface: str = ""  # the text before the document; never cut
    separator: str = "\n\n"  # the text between preface, document and instruction
    answers: tuple[str, ...] = ()  # reference answers; any one is right
    metric: str = ""  # how an answer is scored, one of ``METRICS``; empty: not scored
    answer_prefix: str = ""  # text that an answer must begin with, or its score is 0; it is not compared
    # score only the first line of an answer: models write more few-shot examples after it
    score_first_line: bool = False
    classes: tuple[str, ...] = ()  # for classification, the names of all classes
    no_chat_template: bool = False  # encode as plain text, as LongBench does for its code and few-shot tasks
    truncate_middle: bool = False  # cut the document in its middle instead of at its end
    # sentences that are inserted after the cut, each with its depth, 0 to 1
    needles: tuple[tuple[float, str], ...] = ()
    # the messages of a conversation; all but the last are cut to fit. Empty: no conversation
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: Any = None  # for a conversation, the functions that the model may call; None: none
    continues_previous: bool = False  # the preceding sample is the previous turn of the same conversation

    @property
    def size(self) -> int:
        """Number of characters of the document, or of messages before a conversation's last one: what can be cut."""
        return len(self.messages) - 1 if self.messages else len(self.document)

    def truncated(self, size: int) -> Sample:
        """Returns the sample cut to this size."""
        if self.messages:
            return replace(self, messages=(*self.messages[:-1][:size], self.messages[-1]))
        document = self.document
        if self.truncate_middle and size < len(document):
            document = document[: size - size // 2] + document[len(document) - size // 2 :]
        return replace(self, document=document[:size])

    @property
    def text(self) -> str:
        """The prompt as plain text: preface, document with the needles, instruction."""
        if self.messages:
            return "\n\n".join(message["content"] for message in self.messages)
        parts = self.preface, insert_needles(self.document, self.needles), self.instruction
        return self.separator.join(part for part in parts if part)

    def encode(self, tokenizer: PreTrainedTokenizerBase, raw: bool = False, **template_kwargs: Any) -> list[int]:
        """Returns the prompt's token ids: in the chat template, as a user's message or as the sample's conversation.

        Args:
            raw: encode the plain text, without the chat template.
            template_kwargs: ``system``, and arguments of the chat template.
        """
        if raw or self.no_chat_template:
            return encode(tokenizer, self.text)
        if not self.messages:
            return chat_prompt(tokenizer, self.text, **template_kwargs)
        messages, system = list(self.messages), template_kwargs.pop("system", None)
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return encode_conversation(tokenizer, messages, tools=self.tools, **template_kwargs)


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
    """Cuts the sample until the prompt has at most ``max_tokens`` tokens (None: uncut). Returns the token ids.

    Args:
        raw, kwargs: see :meth:`Sample.encode`.

    Raises:
        ContextError: the instruction alone exceeds ``max_tokens``.
    """
    token_ids = sample.encode(tokenizer, raw, **kwargs)
    if max_tokens is None or len(token_ids) <= max_tokens:
        return token_ids
    # A binary search for the size. Each trial is encoded to count its tokens.
    best: list[int] | None = None  # the longest prompt so far that fits
    low, high = 0, sample.size
    while high - low > 1 and len(best or ()) < max_tokens:
        # Until a trial fits, guess by the size per token of the last trial; then halve the interval.
        guess = max(low + 1, min(high - 1, high * max_tokens // max(1, len(token_ids))))
        size = (low + high) // 2 if best else guess
        trial = sample.truncated(size)
        is_empty = not trial.messages and not trial.document.strip()
        token_ids = [] if is_empty else trial.encode(tokenizer, raw, **kwargs)
        if len(token_ids) <= max_tokens:
            low, best = size, token_ids or best
        else:
            high = size
    if not best:
        raise ContextError(f"{sample.origin}: the instruction alone exceeds {max_tokens} tokens: ask for more context.")
    return best
