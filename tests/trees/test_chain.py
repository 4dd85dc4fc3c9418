"""Chains: the draft's first choices, ended by length, by price, and sequence by sequence."""

from __future__ import annotations

from math import log

import pytest
import torch

from longdraft.trees.chain import LENGTH, LONGEST, Chain
from longdraft.trees.level import Level
from longdraft.trees.node_limit import LARGEST, NodeLimit
from longdraft.trees.options import TreeOptions


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
    none, one, three = Chain().grow([7, 8, 9], draft, [0, 1, 3])
    assert (none.tokens, one.tokens, three.tokens) == ((7,), (8, 1), (9, 1, 2, 3))
    assert three.is_chain and three.log_probs == pytest.approx((0.0, *[log(0.5)] * 3))
    assert draft.calls == [(1, 2), (2,), (2,)]


def test_a_chain_ends_where_it_no_longer_pays():
    """0.5, 0.25 > 0.2 > 0.125; the sure one goes on by itself."""
    draft = Sure(0.5, 0.95)
    short, long = Chain(depth=9, price=0.2).grow([7, 8], draft)
    assert short.drafted == 3 and long.drafted == 9
    assert draft.calls == [(0, 1)] * 3 + [(1,)] * 6


def test_ids_of_a_smaller_vocabulary():
    (tree,) = Chain(depth=2).grow([7], Sure(0.9), ids=torch.arange(20) * 10)
    assert tree.tokens == (7, 10, 20)


def test_a_planner_sizes_it_unless_it_was_asked_for():
    kind = TreeOptions().kind("chain")
    assert (kind.max_nodes, kind.max_expanded, kind.depth) == (LENGTH, LENGTH - 1, LENGTH)
    assert kind.fit(None) is kind and kind.fit(LARGEST).max_nodes == LONGEST

    def drafted(kind, sure, budget):
        return kind.fit(LARGEST).fit(budget).grow([0], Sure(sure), [30])[0].drafted

    assert drafted(kind, 0.9, NodeLimit(8, 0.7)) == 4  # 0.9^4 = 0.66
    assert drafted(kind, 0.99, NodeLimit(8, 0.7)) == 8
    assert drafted(TreeOptions(depth=6).kind("chain"), 0.5, NodeLimit(2, 0.9)) == 6


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"top_k": 3}, 10), ({"widths": (2, 2)}, 4), ({"threshold": 0.5}, 50), ({"depth": 7}, 7), ({"nodes": 2}, 2)],
    ids=str,
)
def test_options_of_other_trees_mean_these(options, kind):
    made = TreeOptions(**options).kind("chain")
    assert isinstance(made, Chain) == (set(options) <= {"depth", "nodes"})
    assert made.max_nodes >= kind if "top_k" in options else made.max_nodes == kind


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
            TreeOptions(**options).kind(default)
