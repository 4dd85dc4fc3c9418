"""Texts that say things twice."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from longdraft.errors import PromptError
from longdraft.training.repeats import RECALL, repeats

TEXTS = ["".join(f"Sentence {i} of a long story about nothing. " for i in range(200)), "A short one, all the same."]


def test_half_come_back_to_passages_and_half_to_facts():
    found = list(repeats(TEXTS, 20, seed=1))
    assert len(found) == 20
    for plain, facts in zip(found[::2], found[1::2], strict=True):
        parts = plain.split("\n\n")
        assert len(set(parts)) < len(parts)
        told, recalled = facts.split(f"\n\n{RECALL} ")
        sentences = re.findall(r"(?:The code|The secret number|In the archive)[^.]*\.", recalled)
        assert len(sentences) >= 4 and all(sentence in told for sentence in sentences)


def test_a_seed_gives_the_same_texts():
    assert list(repeats(TEXTS, 6, seed=3)) == list(repeats(TEXTS, 6, seed=3)) != list(repeats(TEXTS, 6, seed=4))


@pytest.mark.parametrize("texts", [[], ["", "  "]])
def test_there_must_be_text(texts):
    with pytest.raises(PromptError):
        list(islice(repeats(texts, 3), 1))
