"""The text that a level drafts is the level's own: what the target accepts does not depend on who drafts for it."""

from __future__ import annotations

import pytest

from tests.exactness.cases import CASES
from tests.exactness.workshop import DRAWN, GREEDY, generate, rounds
from tests.quick import in_turn


@pytest.mark.parametrize(
    ("name", "sampling"),
    in_turn([name for name in CASES if name.startswith("nested") and name != "nested ar"], [GREEDY, DRAWN]),
)
def test_whoever_drafts_for_it_the_target_accepts_the_same(workshop, name, sampling):
    level = workshop.spec(CASES["nested ar"])  # it decodes by itself
    assert rounds(generate(workshop.spec(CASES[name]), sampling=sampling)) == rounds(generate(level, sampling=sampling))
