"""Planned rounds: trees of any size, or none, and plain decoding's output all the same."""

from __future__ import annotations

import pytest

from longdraft import Speculator
from longdraft.planning.costs import CostTable
from tests.exactness.cases import METHODS, Case
from tests.exactness.workshop import DRAWN, GREEDY, PROMPTS, generate, target, tokens
from tests.planned import draft_without_knowing, use_costs
from tests.quick import in_turn

TABLES = {
    "free": CostTable((0,), (1, 64), ((1e-2, 1.01e-2),)),  # rows cost nothing
    "some": CostTable((0,), (1, 64), ((1e-4, 2e-3),)),
    "dear": CostTable((0,), (1, 2), ((1e-9, 1.0),)),  # a second row costs an age
}
# With trees that nobody asked for.
PLANNED = {
    "prompt-lookup": Case("prompt-lookup"),
    "longspec": Case("longspec", "longspec wide"),
    "longspec lookup": Case("longspec", "longspec wide", {"lookup": True}),
    "eagle3": Case("eagle3", "eagle3"),
    "eagle3 lookup": Case("eagle3", "eagle3", {"lookup": True}),
    "onepass": Case("onepass", "onepass"),
    "onepass lookup": Case("onepass", "onepass", {"lookup": True}),
    "specextend-eagle3": Case("specextend-eagle3", "eagle3", {"chunk": 2, "chunks": 3, "sink": 2, "recent": 4}),
    "small-lm": Case("small-lm", "small-lm"),
    "small-lm lookup": Case("small-lm", "small-lm", {"lookup": True}),
    "specextend": Case("specextend", "small-lm", {"sink": 4, "recent": 8, "chunk": 4, "chunks": 4}),
    "self": Case("self", None, {"view": "snapkv", "budget": 24, "window": 4}),
    "magicdec": Case("magicdec", None, {"budget": 24, "window": 4}),
    "magicdec streaming": Case("magicdec", None, {"budget": 24, "view": "streaming"}),
    "magicdec small-lm": Case("magicdec", "small-lm", {"drafter": "small-lm", "budget": 24}),
    "triforce": METHODS["triforce"],
    "nested": METHODS["nested"],
    "heads": METHODS["heads"],
    "heads opt": Case("heads", "heads", {"tree": "opt", "nodes": 6}),
    "tokenswift": METHODS["tokenswift"],
    "tokenswift no view": Case("tokenswift", "heads", {"reuse_n": 2, "view": "none"}),
}


@pytest.fixture
def costs(monkeypatch):
    """Says what verifications cost."""
    return lambda table: use_costs(monkeypatch, table)


SITUATIONS = (("free", GREEDY), ("some", DRAWN), ("dear", GREEDY), ("some", GREEDY), ("free", DRAWN))


@pytest.mark.parametrize(("name", "situation"), in_turn(PLANNED, SITUATIONS))
def test_the_output_is_plain_decodings(workshop, costs, monkeypatch, name, situation):
    (table, sampling), n = situation, 24
    costs(TABLES[table])
    draft_without_knowing(monkeypatch)
    spec = workshop.spec(PLANNED[name], plan="auto")
    assert spec.planner() is not None
    together = generate(spec, n=n, sampling=sampling)
    assert tokens(together) == workshop.plain(n=n, sampling=sampling)
    drafted = sum(r.drafted for r in together)
    if table == "dear":
        assert drafted == 0 and all(r.rounds == n - 1 for r in together)
    elif table == "free" and sampling is GREEDY:
        assert drafted > 10
    if table == "some":
        (alone,) = generate(spec, PROMPTS[:1], n, sampling)
        assert alone.token_ids == together[0].token_ids


def test_a_tree_that_was_asked_for_is_grown(workshop):
    spec = workshop.spec(PLANNED["longspec"], widths=(2, 2))
    assert spec.planner() is None
    (result,) = generate(spec, PROMPTS[:1])
    assert result.drafted >= 4 * (result.rounds - 2)
    assert workshop.spec(PLANNED["magicdec"], depth=3).planner() is None


def test_a_tree_that_was_asked_for_can_be_cut(workshop, costs):
    costs(TABLES["dear"])
    (result,) = generate(workshop.spec(PLANNED["longspec"], plan="auto", widths=(2, 2)), PROMPTS[:1])
    assert result.drafted == 0 and result.token_ids == workshop.plain()[0]


def test_the_environment_chooses_where_nobody_asks(workshop, costs, monkeypatch):
    costs(TABLES["free"])
    case = PLANNED["longspec"]
    monkeypatch.setenv("LONGDRAFT_PLAN", "auto")
    assert workshop.spec(case).planner() is not None
    assert workshop.spec(case, plan="fixed").planner() is None
    monkeypatch.setenv("LONGDRAFT_PLAN", "fixed")
    assert workshop.spec(case).planner() is None
    assert workshop.spec(case, plan="auto").planner() is not None
    monkeypatch.setenv("LONGDRAFT_PLAN", "best")
    with pytest.raises(ValueError, match="plan"):
        workshop.spec(case).planner()


def test_a_plan_that_there_is_not():
    with pytest.raises(ValueError, match="plan"):
        Speculator("ar", plan="best")


def test_what_is_never_planned(costs, tmp_path):
    """Plain decoding, and KV that lies elsewhere: what that costs is not known."""
    costs(TABLES["free"])
    assert Speculator("ar", target=target(), plan="auto").planner() is None
    assert Speculator("prompt-lookup", target=target(), plan="auto", offload=tmp_path).planner() is None


def test_without_a_table_trees_are_fixed(workshop, costs):
    costs(None)
    spec = workshop.spec(PLANNED["prompt-lookup"], plan="auto")
    assert spec.planner() is None and tokens(generate(spec)) == workshop.plain()
