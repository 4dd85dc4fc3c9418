"""OPT-Tree against one grown by the definition, every candidate looked at."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.trees.level import Level
from longdraft.trees.opt import Opt
from longdraft.trees.options import TreeOptions
from tests.trees.test_beam import VOCABULARY, Table
from tests.trees.test_dynamic import scores

thresholds = st.sampled_from([0.0, 0.02, 0.2, 0.5, 0.7])
many = st.integers(1, 40)


def brute(table: Table, sequence: int, root: int, nodes, depth, threshold, top_k, ids=None):
    """path -> cumulative score of the best nodes, and the levels there were; no candidate is ruled out early."""
    pool: dict[tuple[int, ...], float] = {}
    shown = {(root,): 0.0}
    expected, levels = 0.0, 0
    while levels < depth:
        level = {}
        for path, score in shown.items():
            for i, x in enumerate(torch.log_softmax(table.row(sequence, path), -1).tolist()):
                level[(*path, ids[i] if ids else i)] = score + x
        pool |= dict(sorted(level.items(), key=lambda c: -c[1])[:nodes])
        shown = dict(sorted(level.items(), key=lambda c: -c[1])[:top_k])
        levels += 1
        before, expected = expected, sum(sorted(map(math.exp, pool.values()), reverse=True)[:nodes])
        if expected - before <= threshold:
            break
    return dict(sorted(pool.items(), key=lambda c: -c[1])[:nodes]), levels


@given(many, st.integers(1, 5), thresholds, st.integers(1, 12), st.lists(st.integers(0, 5), min_size=1, max_size=3),
       st.integers(0, 10**6))  # fmt: skip
def test_it_is_the_tree_that_the_definition_gives(nodes, depth, threshold, top_k, depths, seed):
    depths = [min(d, depth) for d in depths]
    roots = list(range(len(depths)))
    table = Table(roots, seed)
    trees = Opt(nodes=nodes, depth=depth, threshold=threshold, top_k=top_k).grow(roots, table.expand, depths)
    calls = [level.rows for level in table.calls]
    for b, (tree, own) in enumerate(zip(trees, depths, strict=True)):
        expected, levels = brute(table, b, roots[b], nodes, own, threshold, top_k)
        got = scores(tree)
        assert tree.tokens[0] == roots[b] and tree.drafted == len(got)
        assert got.keys() == expected.keys()
        assert all(x == pytest.approx(expected[path], abs=1e-4) for path, x in got.items())
        # Closed under parents.
        assert all(path[:-1] in got for path in got if len(path) > 2)
        # No forward more than the definition makes; fewer where nothing of another level could get in.
        assert sum(b in rows for rows in calls) <= levels
    assert all(level.tokens.shape[1] <= min(top_k, nodes) for level in table.calls)


@given(many, thresholds, st.integers(1, 10**6))
def test_a_sequence_stops_when_it_would_alone(nodes, threshold, seed):
    roots = [0, 1, 2, 3]
    table = Table(roots, seed)
    kind = Opt(nodes=nodes, depth=5, threshold=threshold, top_k=6)
    together = kind.grow(roots, table.expand)
    for b, tree in enumerate(together):

        class Own(Table):
            def row(self, sequence, path, b=b):
                return super().row(b, path)

        alone = Own([b], seed)
        (own,) = kind.grow([roots[b]], alone.expand)
        assert scores(own).keys() == scores(tree).keys()
        assert len(alone.calls) == sum(b in level.rows for level in table.calls)


@given(st.integers(1, 30), st.integers(0, 10**6))
def test_no_tree_of_as_many_nodes_is_expected_to_do_better(nodes, seed):
    """With no threshold and all nodes going on: the most probable of all paths there are."""
    table = Table([0], seed, vocabulary=4)
    (tree,) = Opt(nodes=nodes, depth=3, threshold=0.0, top_k=nodes).grow([0], table.expand)
    every = {}
    for length in (1, 2, 3):
        for path in itertools.product(range(4), repeat=length):
            rows = [torch.log_softmax(table.row(0, (0, *path[:i])), -1) for i in range(length)]
            every[(0, *path)] = sum(row[t].item() for row, t in zip(rows, path, strict=True))
    best = sorted(every.values(), reverse=True)[:nodes]
    assert sorted(scores(tree).values(), reverse=True) == pytest.approx(best, abs=1e-4)


def certain(sure: float):
    """A draft that gives one token ``sure`` of the probability, whatever came before."""

    def expand(level: Level) -> torch.Tensor:
        rest = (1 - sure) / (VOCABULARY - 1)
        row = torch.full((VOCABULARY,), math.log(rest))
        row[1] = math.log(sure)
        return row.expand(*level.tokens.shape, -1)

    return expand


def test_deep_where_the_draft_is_sure_and_wide_where_it_is_not():
    (sure,) = Opt(nodes=12, depth=10, threshold=0.7).grow([0], certain(0.99))
    (torn,) = Opt(nodes=12, depth=10, threshold=0.7).grow([0], certain(0.3))
    assert max(sure.depths) == 10 and sure.drafted == torn.drafted == 12
    assert max(torn.depths) == 2  # the first level is worth a token, the second one no more 0.7
    assert max(Opt(nodes=12, depth=4).grow([0], certain(0.99))[0].depths) == 4


def test_a_smaller_threshold_goes_deeper():
    deepest = [max(Opt(nodes=20, threshold=t).grow([0], certain(0.6))[0].depths) for t in (2.0, 0.7, 0.3, 0.1)]
    assert deepest[0] == 1 and deepest == sorted(deepest) and deepest[-1] > deepest[1]


def test_what_cannot_get_in_is_not_shown():
    calls: list[Level] = []

    def expand(level: Level) -> torch.Tensor:
        calls.append(level)
        return certain(0.99)(level)

    Opt(nodes=3, depth=4, threshold=0.5, top_k=3).grow([0, 0], expand)
    # One node of a level is better than the third best so far. At the third level that is the third best itself: what
    # follows it cannot get in, so there is no fourth.
    assert [level.tokens.shape[1] for level in calls] == [1, 1, 1]


def test_tokens_are_the_targets_where_the_draft_has_its_own_vocabulary():
    ids = [100, 7, 42, 99]
    table = Table([0], 5, vocabulary=4, ids=ids)
    (tree,) = Opt(nodes=9, depth=3, threshold=0.1, top_k=9).grow([0], table.expand, ids=torch.tensor(ids))
    assert scores(tree).keys() == brute(table, 0, 0, 9, 3, 0.1, 9, ids)[0].keys()


@pytest.mark.parametrize("value", [60.0, float("inf"), float("nan"), float("-inf")])
def test_it_stays_a_tree_whatever_the_draft_says(value):
    """Certain, overflowed, or out of its mind: ties and numbers that are none must not break the closure."""

    def expand(level: Level) -> torch.Tensor:
        logits = torch.full((*level.tokens.shape, VOCABULARY), -40.0)
        logits[..., 1] = value
        logits[:, ::2] = float("-inf") if value < 0 else logits[:, ::2]
        return logits

    for nodes in range(1, 12):
        # TokenTree refuses a node before its parent.
        (tree,) = Opt(nodes=nodes, depth=3, threshold=0.0, top_k=3).grow([0], expand)
        assert 1 <= tree.drafted <= nodes


@pytest.mark.parametrize(
    ("default", "options", "sizes"),
    [
        # max_nodes, max_expanded, levels
        ("beam", {"tree": "opt"}, (50, 90, 10)),
        ("dynamic", {"threshold": 0.2}, (50, 90, 10)),
        ("opt", {}, (50, 90, 10)),
        ("opt", {"depth": 3, "top_k": 4}, (50, 8, 3)),
        ("opt", {"nodes": 6, "depth": 2}, (6, 6, 2)),
        ("opt", {"depth": 1, "threshold": 0}, (50, 0, 1)),
    ],
    ids=str,
)
def test_kinds(default, options, sizes):
    kind = TreeOptions(**options).kind(default)
    assert (kind.max_nodes, kind.max_expanded, kind.depth) == sizes
    table = Table([0], 0, vocabulary=30)
    (tree,) = kind.grow([0], table.expand, [100])
    assert tree.drafted <= kind.max_nodes and max(tree.depths) <= kind.depth
    assert sum(level.tokens.shape[1] for level in table.calls[1:]) <= kind.max_expanded


def test_threshold_and_depths_arrive():
    eager, lazy = (TreeOptions(threshold=t, top_k=7).kind("opt").grow([0], certain(0.6), [8])[0] for t in (0, 5))
    assert max(eager.depths) > max(lazy.depths) == 1
    none, one = TreeOptions().kind("opt").grow([0, 0], certain(0.9), [0, 1])
    assert none.drafted == 0 and max(one.depths) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tree": "bush"}, "beam, dynamic or opt"),
        ({"tree": "opt", "widths": (2, 2)}, "widths shape a beam tree"),
        ({"widths": (2, 2), "threshold": 0.5}, "threshold shapes an opt tree"),
        ({"tree": "dynamic", "threshold": 0.5}, "threshold shapes an opt tree"),
        ({"threshold": -0.1}, "at least 0"),
        ({"threshold": float("nan")}, "at least 0"),
        ({"threshold": True}, "at least 0"),
        ({"tree": "opt", "nodes": 0}, "nodes must be"),
    ],
    ids=str,
)
def test_options_that_make_no_tree(options, says):
    for default in ("beam", "dynamic", "opt"):
        with pytest.raises(ValueError, match=says):
            TreeOptions(**options).kind(default)
