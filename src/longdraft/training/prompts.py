"""Prompts for the target: passages of documents, each with many instructions.

A draft learns best from the target's own answers; one that is trained on plain text does poorly on answers. Prompts
about a passage begin alike, up to its end, so that its KV is read once for all of them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate, cycle

from longdraft.errors import PromptError

# Texts before a passage ("openings"); what is asked behind one, by kind; prompts without a passage ("free"), where {}
# is a few words taken from a text.
TEXTS: dict[str, list[str]] = json.loads(files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))
# Lines of programs.
CODE_LINE = re.compile(r"^\s*(def|class|import|from|return|if|for|#include|fn|let|pub|self\.)\b", re.M)
# Share of the passages that free prompts replace.
WITHOUT_PASSAGE = 0.12


@dataclass(frozen=True)
class Ask:
    """A prompt.

    Attributes:
        temperature: of its answer.
        kind: what is asked for. source: the file or corpus that the passage is from.
    """

    text: str
    temperature: float
    kind: str = ""
    source: str = ""


def asks(
    texts: Sequence[tuple[str, str]],
    tokens: tuple[int, int],
    per_passage: int,
    temperatures: Sequence[float],
    seed: int,
) -> Iterator[list[Ask]]:
    """An endless series of passages, each with at most ``per_passage`` prompts that begin alike.

    Args:
        texts: the documents, each with the file or corpus that it is from, and with a chance that grows with the square
            root of its length.
        tokens: shortest and longest passage, in tokens (four characters each); lengths are log-uniform.
        temperatures: temperatures of a passage's answers, repeated.

    Raises:
        PromptError: there is no text.
    """
    if not any(text.strip() for text, _ in texts):
        raise PromptError("There is no text to ask about: rows need `text`.")
    rng = random.Random(seed)
    weights = list(accumulate(len(text) ** 0.5 for text, _ in texts))

    def passage(length: int) -> tuple[str, str]:
        ((text, source),) = rng.choices(texts, cum_weights=weights)
        start = rng.randrange(max(1, len(text) - length))
        return text[start : start + length].strip(), source

    while True:
        low, high = tokens
        about, source = passage(int(4 * low * (high / low) ** rng.random()))
        if rng.random() < WITHOUT_PASSAGE:
            topics = (" ".join(passage(120)[0].split()[1 : 1 + rng.randint(1, 4)]) for _ in range(per_passage))
            prompts = [
                (rng.choice(TEXTS["free"]).replace("{}", topic.strip(".,;:!?\"'()")), "free")
                for topic in topics
                if topic
            ]
        elif about:
            opening = rng.choice(TEXTS["openings"])
            prompts = [(opening + about + closing, kind) for closing, kind in _closings(about, per_passage, rng)]
        else:
            continue
        if prompts:
            each = zip(prompts, cycle(temperatures), strict=False)
            yield [Ask(text, temperature, kind, source) for (text, kind), temperature in each]


def _closings(passage: str, count: int, rng: random.Random) -> list[tuple[str, str]]:
    """The questions behind a passage, each with its kind."""
    kinds: dict[str, int | None] = {"summary": None, "question": None, "task": None}
    # A transcript has many short turns, each with its speaker.
    if passage.count(" :") + passage.count(": ") > len(passage) / 600:
        kinds = {"meeting": None, "summary": None, "question": 6}
    if len(CODE_LINE.findall(passage)) > len(passage) / 200:
        kinds = {"code": None, "question": 2}
    texts = [(text, kind) for kind, most in kinds.items() for text in TEXTS[kind][:most]]
    return rng.sample(texts, min(count, len(texts)))
