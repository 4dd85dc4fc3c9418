"""RULER's needle tasks and variable tracking (Hsieh et al. 2024, sections 3.1 and 3.2), at any length.

Needles (sentences) are inserted into RULER's noise or into a text; their depths do not change when the prompt is cut to
length. Not included: the worked example before variable tracking, and haystacks that are made of needles.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from longdraft.bench.data import Sample
from longdraft.bench.scores import metric_of_dataset

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_NOISE_COUNT = 6_000  # about 140,000 tokens, which are cut to length
COUNT = 10
"""Default number of samples of a task."""
_ADJECTIVES = ("amber", "brisk", "calm", "dusty", "eager", "faint", "gentle", "hollow", "iron", "jolly", "keen")
_NOUNS = ("anchor", "basket", "candle", "desert", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle")
_HOPS = 4  # assignments after the first: the variables of a chain are _HOPS + 1

Needles = tuple[list[str], str, tuple[str, ...]]
"""Sentences, the query about them, and its answers."""


def _needles(num_keys: int = 1, num_values: int = 1, num_queries: int = 1) -> Callable[[random.Random], Needles]:
    """A generator of needles ``key is: value``, of which ``num_queries`` keys are queried."""

    def generate(generator: random.Random) -> Needles:
        names = [f"{a}-{n}" for a in _ADJECTIVES for n in _NOUNS]
        keys = generator.sample(names, num_keys)
        numbers = {key: [str(generator.randrange(10**6, 10**7)) for _ in range(num_values)] for key in keys}
        sentences = [f"One of the special magic numbers for {key} is: {n}." for key in keys for n in numbers[key]]
        generator.shuffle(sentences)
        queries = generator.sample(keys, num_queries)
        query = queries[0] if num_queries == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
        return sentences, query, tuple(number for key in queries for number in numbers[key])

    return generate


def _variable_chain(generator: random.Random) -> Needles:
    """Variables with one value: the first is assigned the value, each other one the variable before it."""
    names = ["".join(generator.choices(string.ascii_uppercase, k=5)) for _ in range(_HOPS + 1)]
    value = str(generator.randrange(10_000, 100_000))
    values = [value, *(f"VAR {name}" for name in names)]
    return [f"VAR {name} = {x}." for name, x in zip(names, values, strict=False)], value, tuple(names)


KINDS: dict[str, Callable[[random.Random], Needles]] = {
    "niah_single": _needles(), "niah_multikey": _needles(num_keys=4), "niah_multivalue": _needles(num_values=4),
    "niah_multiquery": _needles(num_keys=4, num_queries=4), "vt": _variable_chain,
}  # fmt: skip
"""RULER's tasks by name. ``niah_single`` is RULER's ``niah_single_1`` in noise, and ``niah_single_2`` in a text."""


def make_samples(kind: str, template: str, haystack: str | None = None, count: int | None = None) -> list[Sample]:
    """Samples of a RULER task. Every call makes equal samples.

    Args:
        kind: one of :data:`KINDS`.
        template: RULER's prompt, with ``{kind}``, ``{context}`` and ``{query}``.
        haystack: the text around the needles; None: RULER's noise.
        count: number of samples; None: :data:`COUNT`.
    """
    samples = []
    for i in range(COUNT if count is None else count):
        generator = random.Random(f"{kind} {i}")
        sentences, query, answers = KINDS[kind](generator)
        depths = [(i + generator.random()) / len(sentences) for i in range(len(sentences))]
        noun, wording = "numbers", template
        if len(answers) == 1:
            noun, wording = "number", template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        before, after = wording.replace("{kind}", noun).replace("{query}", query).split("{context}")
        needles = tuple(zip(depths, sentences, strict=True))
        samples.append(
            Sample(
                haystack or NOISE * _NOISE_COUNT, after, kind, f"{kind}:{i + 1}", before, separator="", answers=answers,
                metric=metric_of_dataset(kind), needles=needles,
            )
        )  # fmt: skip
    return samples
