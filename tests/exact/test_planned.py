"""Planned rounds: trees of any size, or none, and plain decoding's output all the same."""

from __future__ import annotations

from itertools import cycle

import pytest

from longdraft import Speculator
from tests.support.methods import CASES, DRAWN, GREEDY, METHODS, NEW, PROMPTS, generate, target, tokens

pytestmark = pytest.mark.usefixtures("small_sizes")

# Seconds of a forward by its rows.
TABLES = {
    "free": {1: 1e-2, 64: 1.01e-2},
    "some": {1: 1e-4, 64: 2e-3},
    "dear": {1: 1e-9, 2: 1.0},
}
# With trees that nobody asked for.
LOOKUPS = ("longspec lookup earlier", "eagle3 lookup", "small-lm lookup", "tokenswift heads opt", "tokenswift no view")
PLANNED = {name: CASES[name].with_default_tree() for name in (*METHODS, *LOOKUPS) if name != "ar"}
SITUATIONS = (("free", GREEDY), ("some", DRAWN), ("dear", GREEDY), ("some", GREEDY), ("free", DRAWN))


@pytest.mark.parametrize(("name", "situation"), zip(PLANNED, cycle(SITUATIONS), strict=False))
def test_the_output_is_plain_decodings(spec_factory, name, situation):
    (table, sampling), n = situation, NEW
    spec = spec_factory.spec(PLANNED[name], plan=TABLES[table])
    assert spec.planner() is not None
    together = generate(spec, n=n, sampling=sampling)
    assert tokens(together) == spec_factory.plain(n=n, sampling=sampling)
    drafted = sum(r.drafted for r in together)
    if table == "dear":
        assert drafted == 0 and all(r.rounds == n - 1 for r in together)
    elif table == "free" and sampling is GREEDY:
        assert drafted > 10
    if table == "some":
        (alone,) = generate(spec, PROMPTS[:1], n, sampling)
        assert alone.token_ids == together[0].token_ids


def test_a_tree_that_was_asked_for_is_grown_or_cut_by_a_plan_that_was_asked_for(spec_factory):
    spec = spec_factory.spec(PLANNED["longspec"], widths=(2, 2))
    assert spec.planner() is spec_factory.spec(PLANNED["magicdec"], depth=3).planner() is None
    (result,) = generate(spec, PROMPTS[:1])
    assert result.drafted >= 4 * (result.rounds - 2)
    (result,) = generate(spec_factory.spec(PLANNED["longspec"], plan=TABLES["dear"], widths=(2, 2)), PROMPTS[:1])
    assert result.drafted == 0 and result.token_ids == spec_factory.plain()[0]


def test_the_environment_chooses_where_nobody_asks(spec_factory, monkeypatch):
    for said, plans in (("auto", ("auto", "fixed", "auto")), ("fixed", ("fixed", "fixed", "auto"))):
        monkeypatch.setenv("LONGDRAFT_PLAN", said)
        made = [spec_factory.spec(PLANNED["longspec"], **plan) for plan in ({}, {"plan": "fixed"}, {"plan": "auto"})]
        assert [f"plan={plan}" in repr(spec) for spec, plan in zip(made, plans, strict=True)] == [True] * 3
    monkeypatch.setenv("LONGDRAFT_PLAN", "best")
    with pytest.raises(ValueError, match="plan"):
        spec_factory.spec(PLANNED["longspec"]).planner()


def test_what_is_never_planned(spec_factory, cpu_offloads, free_memory):
    """Plain decoding; KV that lies elsewhere, as what that costs is not known; and without memory to measure in."""
    assert Speculator("ar", target=target(), plan=TABLES["free"]).planner() is None
    assert Speculator("prompt-lookup", target=target(), plan=TABLES["free"], offload="host:1").planner() is None
    spec = spec_factory.spec(PLANNED["prompt-lookup"], plan="auto")
    free_memory(0)
    assert spec.planner() is None
    free_memory(10**12)
    assert tokens(generate(spec)) == spec_factory.plain()


def test_a_given_plan_knows_no_clock(spec_factory):
    """By these costs drafting is free, which takes thousands of times as long as what they say of a step."""
    spec = spec_factory.spec(PLANNED["longspec"], plan={1: 1e-6, 64: 1.01e-6})
    results = generate(spec, n=24)
    assert tokens(results) == spec_factory.plain(n=24)
    assert sum(r.drafted for r in results) > 4 * sum(r.rounds for r in results)
