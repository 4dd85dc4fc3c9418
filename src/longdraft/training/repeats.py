"""Texts that repeat themselves, which teach a small draft to copy from its context.

A draft that cannot quote has no use for chunks that were retrieved for it, and plain text repeats little within the
short length that a draft is trained at. Half of these texts repeat passages, half repeat facts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from longdraft.errors import PromptError

NAMES = (
    "Amber", "Basalt", "Cedar", "Delta", "Falcon", "Granite", "Harbor", "Iris", "Juniper", "Kestrel", "Lark", "Maple",
    "Nova", "Onyx", "Quartz", "Raven", "Saffron", "Tundra", "Willow", "Zephyr",
)  # fmt: skip
FACTS = ("The code of {} is {}.", "The secret number for {} is {}.", "In the archive, {} is listed under {}.")
RECALL = "What was said above?"


def repeats(texts: Sequence[str], count: int, seed: int = 0) -> Iterator[str]:
    """``count`` texts of about 2,000 characters each.

    Args:
        texts: texts to take passages from, each with a chance that grows with the square root of its length.

    Raises:
        PromptError: there is no text.
    """
    if not any(text.strip() for text in texts):
        raise PromptError("There is no text to take passages from: rows need `text`.")
    rng = random.Random(seed)
    weights = [len(text) ** 0.5 for text in texts]
    for i in range(count):
        passages = [_passage(rng, texts, weights) for _ in range(rng.randint(4, 9))]
        yield (_with_facts if i % 2 else _with_repeats)(rng, passages)


def _passage(rng: random.Random, texts: Sequence[str], weights: Sequence[float]) -> str:
    while True:
        text = rng.choices(texts, weights)[0]
        length = rng.randint(100, 400)
        start = rng.randrange(max(1, len(text) - length))
        if passage := text[start : start + length].strip():
            return passage


def _with_repeats(rng: random.Random, passages: list[str]) -> str:
    again = rng.sample(passages, max(1, len(passages) // 2))
    return "\n\n".join([*passages, *again])


def _with_facts(rng: random.Random, passages: list[str]) -> str:
    names = rng.sample(NAMES, len(passages))
    facts = [rng.choice(FACTS).format(name, _code(rng)) for name in names]
    text = "\n".join(f"{passage} {fact}" for passage, fact in zip(passages, facts, strict=True))
    return "\n\n".join([text, f"{RECALL} {' '.join(rng.sample(facts, len(facts)))}"])


def _code(rng: random.Random) -> str:
    digits = str(rng.randrange(1000, 1000000))
    pairs = "-".join(str(rng.randrange(10, 100)) for _ in range(3))
    return rng.choice((digits, f"{rng.choice('ABCDEFKNX')}-{digits[:4]}", pairs))
