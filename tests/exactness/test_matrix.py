"""Every method, with every option that drafts otherwise, writes what plain decoding writes: greedy, and with a seed.

A ragged batch of four prompts; one or two of them are decoded once more on their own.
"""

from __future__ import annotations

import pytest

from tests.exactness.cases import CASES, METHODS
from tests.exactness.workshop import DRAWN, GREEDY, PENALISED, PROMPTS, SEED, generate, rounds, target, tokens
from tests.quick import in_turn
from tests.tiny import FAMILIES


@pytest.mark.parametrize(("name", "sampling"), in_turn(CASES, [GREEDY, DRAWN], both=METHODS))
def test_a_ragged_batch(workshop, name, sampling):
    case = CASES[name]
    spec = workshop.spec(case)
    together = generate(spec, sampling=sampling)
    assert tokens(together) == workshop.plain(sampling=sampling)
    assert {(r.method, r.exact) for r in together} == {(case.method, True)}
    assert sum(r.accepted for r in together) > 0 or name in ("ar", "specpv-exact ar")
    if case.method == "specpv-exact":
        assert sum(r.partial_rounds for r in together) > 0 and sum(r.rolled_back for r in together) > 0
    # Slots share nothing, and they end one by one.
    alone = ((1, 2) if sampling is GREEDY else (0, 2)) if name in METHODS else (2,)
    for i in alone:
        (one,) = generate(spec, (PROMPTS[i],), sampling=sampling, seed=SEED + i)
        if case.alike:
            assert rounds([one]) == rounds([together[i]])
        assert one.token_ids == together[i].token_ids


@pytest.mark.parametrize(("name", "family"), in_turn(METHODS, [family for family in FAMILIES if family != "llama"]))
def test_other_families(workshop, name, family):
    model = target(family)
    results = generate(workshop.spec(METHODS[name], model))
    assert tokens(results) == workshop.plain(model) and (sum(r.drafted for r in results) > 0 or name == "ar")


@pytest.mark.parametrize("name", METHODS)
def test_penalties_see_a_nodes_own_path(workshop, name):
    """Greedy with processors: no node's token is known before the walk comes there."""
    results = generate(workshop.spec(METHODS[name]), sampling=PENALISED)
    assert tokens(results) == workshop.plain(sampling=PENALISED)
