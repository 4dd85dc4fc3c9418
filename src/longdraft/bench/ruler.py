"""RULER's needles and chains of variables (Hsieh et al. 2024, sections 3.1 and 3.2), made at any length.

Sentences lie in RULER's noise or in a given text, at depths that stay where they are when the prompt is cut to length.
Left out: the worked example before a chain of variables, and haystacks made of needles.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from longdraft.bench.data import Sample
from longdraft.bench.scores import metric_of_dataset

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
# Some 140,000 tokens, which are cut to the length that is asked for.
_NOISE_TIMES = 6_000
COUNT = 10
"""Samples of a kind where no limit is given."""
_ADJECTIVES = ("amber", "brisk", "calm", "dusty", "eager", "faint", "gentle", "hollow", "iron", "jolly", "keen")
_NOUNS = ("anchor", "basket", "candle", "desert", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle")
_HOPS = 4

Needles = tuple[list[str], str, tuple[str, ...]]
"""Sentences, what is asked about, and the answers."""


def _needles(keys: int = 1, values: int = 1, asked: int = 1) -> Callable[[random.Random], Needles]:
    def made(generator: random.Random) -> Needles:
        names = [f"{a}-{n}" for a in _ADJECTIVES for n in _NOUNS]
        chosen = generator.sample(names, keys)
        said = {key: [str(generator.randrange(10**6, 10**7)) for _ in range(values)] for key in chosen}
        sentences = [f"One of the special magic numbers for {k} is: {v}." for k, own in said.items() for v in own]
        generator.shuffle(sentences)
        queries = generator.sample(list(said), asked)
        query = queries[0] if asked == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
        return sentences, query, tuple(value for key in queries for value in said[key])

    return made


def _chain(generator: random.Random) -> Needles:
    names = ["".join(generator.choices(string.ascii_uppercase, k=5)) for _ in range(_HOPS + 1)]
    value = str(generator.randrange(10_000, 100_000))
    values = [value, *(f"VAR {name}" for name in names)]
    return [f"VAR {name} = {x}." for name, x in zip(names, values, strict=False)], value, tuple(names)


KINDS: dict[str, Callable[[random.Random], Needles]] = {
    "niah_single": _needles(), "niah_multikey": _needles(keys=4), "niah_multivalue": _needles(values=4),
    "niah_multiquery": _needles(keys=4, asked=4), "vt": _chain,
}  # fmt: skip
"""Kinds by RULER's names: in noise ``niah_single`` is its ``niah_single_1``, in essays ``niah_single_2``."""


def make_samples(kind: str, template: str, haystack: str | None = None, count: int | None = None) -> list[Sample]:
    """Prompts with needles, the same ones every time.

    Args:
        kind: one of :data:`KINDS`.
        template: RULER's words, with ``{kind}``, ``{context}`` and ``{query}``.
        hay: the text around the needles; None: RULER's noise.
        count: how many; None: :data:`COUNT`.
    """
    found = []
    for i in range(COUNT if count is None else count):
        generator = random.Random(f"{kind} {i}")
        sentences, query, answers = KINDS[kind](generator)
        depths = [(place + generator.random()) / len(sentences) for place in range(len(sentences))]
        what, words = "numbers", template
        if len(answers) == 1:
            what, words = "number", template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        before, after = words.replace("{kind}", what).replace("{query}", query).split("{context}")
        needles = tuple(zip(depths, sentences, strict=True))
        found.append(
            Sample(
                haystack or NOISE * _NOISE_TIMES, after, kind, f"{kind}:{i + 1}", before, separator="", answers=answers,
                metric=metric_of_dataset(kind), needles=needles,
            )
        )  # fmt: skip
    return found
