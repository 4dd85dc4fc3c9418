"""The needle test: a sentence with a code lies somewhere in a long text, and the model is asked for the code."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.bench import data
from longdraft.errors import ContextError, PromptError
from longdraft.host.chat import chat_prompt, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The answer begins with the sentence's own words, so most of the code is written after the first rounds.
NEEDLE = "The secret code of the {colour} door is {code}."
QUESTION = "What is the secret code of the {colour} door?"
ANSWER_TOKENS = 28
COLOURS = ("blue", "red", "green", "yellow", "white", "black")
# A text that is cut between two tokens and encoded again may be a few tokens longer.
SLACK = 16


@dataclass(frozen=True)
class Search:
    """What to build haystacks from.

    Attributes:
        path: JSONL as for the bench, or plain text.
        depths: where needles lie, 0 at the beginning, 1 at the end.
        context: tokens of a prompt.
        samples: haystacks of each depth.
    """

    path: Path
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    context: int = 1500
    samples: int = 2

    def __post_init__(self) -> None:
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"needle-depths must lie between 0 and 1, got {', '.join(map(str, self.depths))}")
        if self.samples < 1:
            raise ValueError(f"needle-samples must be at least 1, got {self.samples}")


@dataclass(frozen=True)
class Haystack:
    """A prompt with a needle in it.

    Attributes:
        depth: where it was asked for. sentence: the needle. code: the answer, in it.
    """

    tokens: tuple[int, ...]
    depth: float
    sentence: str
    code: str


def haystacks(search: Search, tokenizer: PreTrainedTokenizerBase) -> list[Haystack]:
    """The prompts; those of one text stand together, the deepest needle first: each shares its beginning with the next.

    Raises:
        PromptError: the file cannot be read, or its text is too short.
        ContextError: the context leaves no room for text.
    """
    longest = max(COLOURS, key=len)
    asked = QUESTION.format(colour=longest)
    room = search.context - SLACK - len(chat_prompt(tokenizer, asked, NEEDLE.format(colour=longest, code=10**5)))
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
    found = []
    for sample in range(search.samples):
        hay = str(tokenizer.decode(ids[sample * step : sample * step + room], skip_special_tokens=True))
        for depth in sorted(set(search.depths), reverse=True):
            draw = random.Random(f"{sample} {depth}")
            colour, code = draw.choice(COLOURS), str(draw.randrange(10000, 100000))
            sentence = NEEDLE.format(colour=colour, code=code)
            prompt = chat_prompt(tokenizer, QUESTION.format(colour=colour), place(hay, sentence, depth))
            found.append(Haystack(tuple(prompt), depth, sentence, code))
    return found


def place(text: str, sentence: str, depth: float) -> str:
    """The text with a sentence put in: at the first end of a sentence, else of a word, from that depth on."""
    at = round(depth * len(text))
    border = re.compile(r"[.!?]\s|\n").search(text, at) or re.compile(r"\s").search(text, at)
    at = border.end() if border else len(text)
    before, after = text[:at].rstrip(" "), text[at:].lstrip(" ")
    return " ".join(part for part in (before, sentence, after) if part)


def found(answer: str, code: str) -> bool:
    """Whether the first number in an answer is the code."""
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
