"""The needle test: a sentence with a code lies somewhere in a long text, and the model is asked for the code."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.bench import data
from longdraft.errors import ContextError, PromptError
from longdraft.model.chat import chat_prompt, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The answer begins with the sentence's own words, so most of the code is written after the first rounds.
NEEDLE = "The secret code of the {colour} door is {code}."
TRACKED = "Which variables have the value {code}? Name all of them."
QUESTION = "What is the secret code of the {colour} door?"
ANSWER_TOKENS = 28
COLOURS = ("blue", "red", "green", "yellow", "white", "black")
# A text that is cut between two tokens and encoded again may be a few tokens longer.
SLACK = 16


@dataclass(frozen=True)
class Search:
    """Settings of haystacks.

    Attributes:
        path: JSONL as for the bench, or plain text.
        depths: where needles lie, 0 at the beginning, 1 at the end.
        context: tokens of a prompt.
        samples: texts of each kind; "single" asks each of them at each depth.
        kinds: of :data:`KINDS`.
        asked: ``system`` and arguments of the chat template.
    """

    path: Path
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    context: int = 1500
    samples: int = 2
    kinds: tuple[str, ...] = ("single",)
    asked: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"needle-depths must lie between 0 and 1, got {', '.join(map(str, self.depths))}")
        if self.samples < 1:
            raise ValueError(f"needle-samples must be at least 1, got {self.samples}")
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"needle-kinds are {', '.join(KINDS)}, got {', '.join(self.kinds) or 'none'}")
        if "several" in self.kinds and len(set(self.depths)) > len(COLOURS):
            raise ValueError(f"needle-depths: several needles lie at {len(COLOURS)} depths at most")


@dataclass(frozen=True)
class Needle:
    """Sentences to put into a text, and a question about one of them.

    Attributes:
        sentences: depth and sentence of each.
        question: the question behind the text.
        depth, sentence, code: those of the sentence in question; it holds the code, which is the answer.
        names: what the answer must hold instead of the code; empty: the code.
    """

    sentences: tuple[tuple[float, str], ...]
    question: str
    depth: float
    sentence: str
    code: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Haystack:
    """A prompt with a needle in it. ``kind``: one of :data:`KINDS`."""

    tokens: tuple[int, ...]
    needle: Needle
    kind: str = "single"

    @property
    def depth(self) -> float:
        return self.needle.depth

    def score(self, answer: str) -> float:
        """Share of an answer that is right: 1 if its first number is the code; or the share of names in it."""
        names = self.needle.names
        if not names:
            return float(found(answer, self.needle.code))
        return sum(re.search(rf"\b{name}\b", answer) is not None for name in names) / len(names)


def _single(depths: Sequence[float], sample: int) -> list[Needle]:
    made = []
    for depth in depths:
        generator = random.Random(f"{sample} {depth}")
        made += _coloured((depth,), (generator.choice(COLOURS),), (_code(generator),))
    return made


def _several(depths: Sequence[float], sample: int) -> list[Needle]:
    generator = random.Random(f"several {sample}")
    colours = generator.sample(COLOURS, len(depths))
    return _coloured(depths, colours, [_code(generator) for _ in depths])


def _coloured(depths: Sequence[float], colours: Sequence[str], codes: Sequence[str]) -> list[Needle]:
    """A needle for each colour; the sentences of all of them lie in the text."""
    sentences = [NEEDLE.format(colour=colour, code=code) for colour, code in zip(colours, codes, strict=True)]
    places = tuple(zip(depths, sentences, strict=True))
    return [
        Needle(places, QUESTION.format(colour=colour), depth, sentence, code)
        for (depth, sentence), colour, code in zip(places, colours, codes, strict=True)
    ]


def _tracking(depths: Sequence[float], sample: int) -> list[Needle]:
    generator = random.Random(f"tracking {sample}")
    code = _code(generator)
    names = ["".join(generator.sample(string.ascii_uppercase, 3)) for _ in depths]
    values = [code, *(f"VAR {name}" for name in names[:-1])]
    chain = [f"VAR {name} = {value}." for name, value in zip(names, values, strict=True)]
    places = tuple(zip(sorted(depths), chain, strict=True))
    return [Needle(places, TRACKED.format(code=code), *places[0], code, tuple(names))]


def _code(generator: random.Random) -> str:
    return str(generator.randrange(10000, 100000))


# Kinds of RULER (Hsieh et al. 2024, section 3): one needle; one of several with similar keys; a chain of variables.
KINDS: dict[str, Callable[[Sequence[float], int], list[Needle]]] = {
    "single": _single, "several": _several, "tracking": _tracking,
}  # fmt: skip


def haystacks(search: Search, tokenizer: PreTrainedTokenizerBase) -> list[Haystack]:
    """The prompts; those of one text stand together, the deepest needle first: each shares its beginning with the next.

    Raises:
        PromptError: the file cannot be read, or its text is too short.
        ContextError: the context leaves no room for text.
    """
    depths = sorted(set(search.depths), reverse=True)
    needles = {kind: [KINDS[kind](depths, sample) for sample in range(search.samples)] for kind in search.kinds}

    def asking(question: str, text: str) -> list[int]:
        return chat_prompt(tokenizer, question, text, **search.asked)

    taken = max(
        len(asking(needle.question, " ".join(sentence for _, sentence in needle.sentences)))
        for samples in needles.values() for sample in samples for needle in sample
    )  # fmt: skip
    room = search.context - SLACK - taken
    if room < 1:
        raise ContextError(
            f"A needle's context of {search.context} tokens has no room for text: raise --needle-context."
        )
    # A token is seldom longer than 16 characters; more text than that is not read.
    ids = encode(tokenizer, data.text(search.path)[: 16 * room * search.samples])
    if len(ids) < room:
        raise PromptError(
            f"{search.path} holds {len(ids):,} tokens, and haystacks of {search.context:,} need {room:,}: lower "
            "--needle-context, or name a longer text."
        )
    step = min(room, (len(ids) - room) // max(1, search.samples - 1))
    made = []
    for sample in range(search.samples):
        hay = str(tokenizer.decode(ids[sample * step : sample * step + room], skip_special_tokens=True))
        for kind, samples in needles.items():
            for needle in samples[sample]:
                text = data.place(hay, needle.sentences)
                made.append(Haystack(tuple(asking(needle.question, text)), needle, kind))
    return made


def found(answer: str, code: str) -> bool:
    """True if the first number in an answer is the code."""
    number = re.search(r"\d[\d,]*", answer)
    return number is not None and number.group().replace(",", "") == code
