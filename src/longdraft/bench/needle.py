"""The needle test: a sentence with a code lies somewhere in a long text, and the model is asked for the code."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
    """

    path: Path
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    context: int = 1500
    samples: int = 2
    kinds: tuple[str, ...] = ("single",)

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
class Asked:
    """A needle: the sentence put into a text, and the question about it.

    Attributes:
        needles: depth and sentence of each. asked: the question.
        depth, sentence, code: of the needle that is asked for; the code is the answer, in it.
        names: what else is the answer; none: the code.
    """

    needles: tuple[tuple[float, str], ...]
    asked: str
    depth: float
    sentence: str
    code: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Haystack:
    """A prompt with needles in it.

    Attributes:
        depth: where the one that is asked for lies. sentence: that needle. code: the answer, in it.
        kind: of :data:`KINDS`. names: what the answer is to hold instead of the code.
    """

    tokens: tuple[int, ...]
    depth: float
    sentence: str
    code: str
    kind: str = "single"
    names: tuple[str, ...] = ()

    def score(self, answer: str) -> float:
        """Share of an answer that is right: whether its first number is the code; or names that it holds."""
        if not self.names:
            return float(found(answer, self.code))
        return sum(re.search(rf"\b{name}\b", answer) is not None for name in self.names) / len(self.names)


def _single(depths: Sequence[float], sample: int) -> list[Asked]:
    made = []
    for depth in depths:
        draw = random.Random(f"{sample} {depth}")
        colour, code = draw.choice(COLOURS), str(draw.randrange(10000, 100000))
        sentence = NEEDLE.format(colour=colour, code=code)
        made.append(Asked(((depth, sentence),), QUESTION.format(colour=colour), depth, sentence, code))
    return made


def _several(depths: Sequence[float], sample: int) -> list[Asked]:
    draw = random.Random(f"several {sample}")
    colours = draw.sample(COLOURS, len(depths))
    codes = [str(draw.randrange(10000, 100000)) for _ in depths]
    sentences = [NEEDLE.format(colour=colour, code=code) for colour, code in zip(colours, codes, strict=True)]
    needles = tuple(zip(depths, sentences, strict=True))
    return [
        Asked(needles, QUESTION.format(colour=colour), depth, sentence, code)
        for depth, colour, sentence, code in zip(depths, colours, sentences, codes, strict=True)
    ]


def _tracking(depths: Sequence[float], sample: int) -> list[Asked]:
    draw = random.Random(f"tracking {sample}")
    code = str(draw.randrange(10000, 100000))
    names = ["".join(draw.sample(string.ascii_uppercase, 3)) for _ in depths]
    values = [code, *(f"VAR {name}" for name in names)]
    needles = tuple(
        (depth, f"VAR {name} = {value}.") for depth, name, value in zip(sorted(depths), names, values, strict=False)
    )
    depth, sentence = needles[0]
    return [Asked(needles, TRACKED.format(code=code), depth, sentence, code, tuple(names))]


# Kinds of RULER (Hsieh et al. 2024, section 3): one needle; one of several whose keys are alike; a chain of variables.
KINDS: dict[str, Callable[[Sequence[float], int], list[Asked]]] = {
    "single": _single, "several": _several, "tracking": _tracking,
}  # fmt: skip


def haystacks(search: Search, tokenizer: PreTrainedTokenizerBase) -> list[Haystack]:
    """The prompts; those of one text stand together, the deepest needle first: each shares its beginning with the next.

    Raises:
        PromptError: the file cannot be read, or its text is too short.
        ContextError: the context leaves no room for text.
    """
    depths = sorted(set(search.depths), reverse=True)
    asked = {kind: [KINDS[kind](depths, sample) for sample in range(search.samples)] for kind in search.kinds}
    taken = max(
        len(chat_prompt(tokenizer, each.asked, " ".join(sentence for _, sentence in each.needles)))
        for texts in asked.values() for own in texts for each in own
    )  # fmt: skip
    room = search.context - SLACK - taken
    if room < 1:
        raise ContextError(
            f"A needle's context of {search.context} tokens has no room for text: raise --needle-context."
        )
    # A token is seldom longer than 16 characters; more text than that is not read.
    ids = encode(tokenizer, _text(search.path)[: 16 * room * search.samples])
    if len(ids) < room:
        raise PromptError(
            f"{search.path} holds {len(ids):,} tokens, and haystacks of {search.context:,} need {room:,}: lower "
            "--needle-context, or name a longer text."
        )
    step = min(room, (len(ids) - room) // max(1, search.samples - 1))
    made = []
    for sample in range(search.samples):
        hay = str(tokenizer.decode(ids[sample * step : sample * step + room], skip_special_tokens=True))
        for kind, texts in asked.items():
            for each in texts[sample]:
                text = hay
                for depth, sentence in sorted(each.needles, reverse=True):
                    text = place(text, sentence, depth)
                prompt = tuple(chat_prompt(tokenizer, each.asked, text))
                made.append(Haystack(prompt, each.depth, each.sentence, each.code, kind, each.names))
    return made


def place(text: str, sentence: str, depth: float) -> str:
    """The text with a sentence put in: at the first end of a sentence, else of a word, from that depth on."""
    at = round(depth * len(text))
    border = re.compile(r"[.!?]\s|\n").search(text, at) or re.compile(r"\s").search(text, at)
    at = border.end() if border else len(text)
    before, after = text[:at].rstrip(" "), text[at:].lstrip(" ")
    return " ".join(part for part in (before, sentence, after) if part)


def found(answer: str, code: str) -> bool:
    """True if the first number in an answer is the code."""
    number = re.search(r"\d[\d,]*", answer)
    return number is not None and number.group().replace(",", "") == code


def _text(path: Path) -> str:
    if path.suffix == ".jsonl":
        return "\n\n".join(sample.document for sample in data.read([path]))
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PromptError(f"There is no file {path}: check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read as UTF-8 text: {error}.") from None
