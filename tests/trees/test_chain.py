"""Chains: the draft's first choices, ended by length, by price, and sequence by sequence."""

from __future__ import annotations

from math import log

import pytest
import torch

from longdraft.trees.beam import Level
from longdraft.trees.budget import Budget
from longdraft.trees.chain import LENGTH, LONGEST, chain_of
from longdraft.trees.plan import tree_plan


class Sure:
    """A draft that says token (depth + 1) next, with this probability; it writes down whom it was asked for."""

    def __init__(self, *chances: float) -> None:
        self.chances, self.calls = chances, []

    def __call__(self, level: Level) -> torch.Tensor:
        self.calls.append(level.rows)
        logits = torch.zeros(*level.tokens.shape, 20)
        for i, row in enumerate(level.rows):
            p = self.chances[row]
            logits[i, 0] = log((1 - p) / 19)
            logits[i, 0, level.depth + 1] = log(p)
        return logits


def test_as_long_as_asked_for():
    draft = Sure(0.5, 0.9, 0.5)
    none, one, three = chain_of([7, 8, 9], draft, [0, 1, 3])
    assert (none.tokens, one.tokens, three.tokens) == ((7,), (8, 1), (9, 1, 2, 3))
    assert three.is_chain and three.log_probs == pytest.approx((0.0, *[log(0.5)] * 3))
    assert draft.calls == [(1, 2), (2,), (2,)]


def test_a_chain_ends_where_it_no_longer_pays():
    """0.5, 0.25 > 0.2 > 0.125; the sure one goes on by itself."""
    draft = Sure(0.5, 0.95)
    short, long = chain_of([7, 8], draft, [9, 9], price=0.2)
    assert short.drafted == 3 and long.drafted == 9
    assert draft.calls == [(0, 1)] * 3 + [(1,)] * 6


def test_ids_of_a_smaller_vocabulary():
    (tree,) = chain_of([7], Sure(0.9), [2], ids=torch.arange(20) * 10)
    assert tree.tokens == (7, 10, 20)


def test_as_a_plan():
    plan = tree_plan("chain")
    assert (plan.max_nodes, plan.shown, plan.depth) == (LENGTH, LENGTH - 1, LENGTH)
    planned = plan.adaptive()
    assert planned.max_nodes == LONGEST
    grown = [p.grow([0], Sure(0.9), [30], None, "cpu", budget=Budget(8, 0.7))[0].drafted for p in (plan, planned)]
    assert grown == [4, 4]  # 0.9^4 = 0.66
    assert planned.grow([0], Sure(0.99), [30], None, "cpu", budget=Budget(8, 0.7))[0].drafted == 8
    asked = tree_plan("chain", depth=6).adaptive()
    assert asked.grow([0], Sure(0.5), [30], None, "cpu", budget=Budget(2, 0.9))[0].drafted == 6


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"top_k": 3}, 10), ({"widths": (2, 2)}, 4), ({"threshold": 0.5}, 50), ({"depth": 7}, 7), ({"nodes": 2}, 2)],
    ids=str,
)
def test_options_of_other_trees_mean_these(options, kind):
    plan = tree_plan("chain", **options)
    assert plan.chain == (set(options) <= {"depth", "nodes"})
    assert plan.max_nodes >= kind if "top_k" in options else plan.max_nodes == kind


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tree": "chain", "top_k": 3}, "a chain takes depth"),
        ({"tree": "chain", "widths": (1, 1)}, "widths shape a beam tree"),
        ({"tree": "chain", "threshold": 0.5}, "threshold shapes an opt tree"),
        ({"tree": "chain", "depth": 0}, "depth must be"),
    ],
    ids=str,
)
def test_options_that_make_no_chain(options, says):
    for default in ("chain", "beam", "opt"):
        with pytest.raises(ValueError, match=says):
            tree_plan(default, **options)
