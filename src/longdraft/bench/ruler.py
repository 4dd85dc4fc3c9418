"""Makes samples of RULER's needle tasks and variable tracking (Hsieh et al. 2024, sections 3.1 and 3.2).

Needles (sentences) are inserted into RULER's noise or into a text. A needle's depth is a fraction of the text, so that
it stays when a caller shortens the text. Left out: the example before variable tracking, and haystacks of needles.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from longdraft.bench.data import Sample
from longdraft.bench.scores import CONTAINS

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_NOISE_REPEATS = 6_000  # about 140,000 tokens, before prompts are cut to length
NUM_SAMPLES = 10
"""Default number of samples of a task."""
_ADJECTIVES = ("amber", "brisk", "calm", "dusty", "eager", "faint", "gentle", "hollow", "iron", "jolly", "keen")
_NOUNS = ("anchor", "basket", "candle", "desert", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle")
_HOPS = 4  # assignments of a variable to a variable: a chain has _HOPS + 1 variables

Needles = tuple[list[str], str, tuple[str, ...]]
"""The sentences to insert, the subject of the question about the sentences, and the answers to the question."""


def _needles(num_keys: int = 1, num_values: int = 1, num_queries: int = 1) -> Callable[[random.Random], Needles]:
    """Returns a function that makes needles. A needle gives a key and a value; a key has ``num_values`` needles. The
    question names ``num_queries`` keys."""

    def generate(generator: random.Random) -> Needles:
        names = [f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS]
        keys = generator.sample(names, num_keys)
        numbers = {key: [str(generator.randrange(10**6, 10**7)) for _ in range(num_values)] for key in keys}
        sentences = [f"One of the special magic numbers for {key} is: {n}." for key in keys for n in numbers[key]]
        generator.shuffle(sentences)
        queried = generator.sample(keys, num_queries)
        query = queried[0] if num_queries == 1 else f"{', '.join(queried[:-1])}, and {queried[-1]}"
        return sentences, query, tuple(number for key in queried for number in numbers[key])

    return generate


def _variable_chain(generator: random.Random) -> Needles:
    """Makes assignments that give variables the same value: the first sets it, later ones copy the variable before."""
    names = ["".join(generator.choices(string.ascii_uppercase, k=5)) for _ in range(_HOPS + 1)]
    value = str(generator.randrange(10_000, 100_000))
    right_sides = [value, *(f"VAR {name}" for name in names)]
    assignments = [f"VAR {name} = {right}." for name, right in zip(names, right_sides, strict=False)]
    return assignments, value, tuple(names)


TASKS: dict[str, Callable[[random.Random], Needles]] = {
    "niah_single": _needles(), "niah_multikey": _needles(num_keys=4), "niah_multivalue": _needles(num_values=4),
    "niah_multiquery": _needles(num_keys=4, num_queries=4), "vt": _variable_chain,
}  # fmt: skip
"""Task -> function that makes the needles of one sample. ``niah_single`` is RULER's ``niah_single_1`` in noise, and
RULER's ``niah_single_2`` in a text."""


def make_samples(task: str, template: str, haystack: str | None = None, num_samples: int | None = None) -> list[Sample]:
    """Makes samples of a RULER task. Two calls with equal arguments make equal samples.

    Args:
        task: one of :data:`TASKS`.
        template: RULER's prompt, with ``{kind}`` ("number" or "numbers"), ``{context}`` and ``{query}``.
        haystack: the text around the needles; None: RULER's noise.
        num_samples: number of samples; None: :data:`NUM_SAMPLES`.
    """
    samples = []
    for i in range(NUM_SAMPLES if num_samples is None else num_samples):
        generator = random.Random(f"{task} {i}")
        sentences, query, answers = TASKS[task](generator)
        # The text has len(sentences) equal parts; each part gets one needle at a random depth.
        depths = [(part + generator.random()) / len(sentences) for part in range(len(sentences))]
        noun, prompt = "numbers", template
        if len(answers) == 1:  # the template is in the plural
            noun, prompt = "number", template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        before, after = prompt.replace("{kind}", noun).replace("{query}", query).split("{context}")
        needles = tuple(zip(depths, sentences, strict=True))
        samples.append(
            Sample(
                haystack or NOISE * _NOISE_REPEATS, after, task, f"{task}:{i + 1}", before, separator="",
                answers=answers, metric=CONTAINS, needles=needles,
            )
        )  # fmt: skip
    return samples
