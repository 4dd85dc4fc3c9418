"""The dynamic tree against one grown by looking at every candidate, and the options that choose between trees."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.trees.dynamic import Dynamic
from longdraft.trees.level import Level
from longdraft.trees.options import TreeOptions
from tests.trees.test_beam import VOCABULARY, Table, described


def brute(table: Table, sequence: int, root: int, depth, top_k, nodes, ids=None) -> dict[tuple[int, ...], float]:
    """path -> cumulative score of the ``nodes`` best candidates, in exact order of definition."""
    pool: dict[tuple[int, ...], float] = {}
    shown = {(root,): 0.0}
    for _ in range(depth):
        level = {}
        for path, score in shown.items():
            logp = torch.log_softmax(table.row(sequence, path), -1)
            best = logp.topk(min(top_k, len(logp)))
            for x, i in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level[(*path, ids[i] if ids else i)] = score + x
        pool |= level
        shown = dict(sorted(level.items(), key=lambda c: -c[1])[:top_k])
    return dict(sorted(pool.items(), key=lambda c: -c[1])[:nodes])


def scores(tree) -> dict[tuple[int, ...], float]:
    given_parent = described(tree)
    return {path: sum(given_parent[path[:n]] for n in range(2, len(path) + 1)) for path in given_parent}


depths = st.lists(st.integers(0, 4), min_size=1, max_size=3)


@given(st.integers(1, 4), st.integers(1, 9), depths, st.one_of(st.none(), st.integers(1, 40)), st.integers(0, 10**6))
def test_it_is_the_tree_that_looking_at_every_candidate_gives(depth, top_k, depths, nodes, seed):
    depths = [min(d, depth) for d in depths]
    roots = list(range(len(depths)))
    table = Table(roots, seed)
    trees = Dynamic(depth=depth, top_k=top_k, nodes=nodes).grow(roots, table.expand, depths)
    for b, (tree, own) in enumerate(zip(trees, depths, strict=True)):
        expected = brute(table, b, roots[b], own, top_k, nodes)
        got = scores(tree)
        assert tree.tokens[0] == roots[b] and tree.drafted == len(got)
        assert got.keys() == expected.keys()
        assert all(x == pytest.approx(expected[path], abs=1e-4) for path, x in got.items())
        # Closed under parents.
        assert all(path[:-1] in got for path in got if len(path) > 2)
    assert all(level.tokens.shape[1] <= top_k for level in table.calls)


def test_the_papers_sizes():
    table = Table([3], 0, vocabulary=50)
    (tree,) = Dynamic().grow([3], table.expand)
    assert tree.size == 60
    assert [(level.depth, level.tokens.shape[1]) for level in table.calls] == [(0, 1), *((d, 10) for d in range(1, 7))]
    (whole,) = Dynamic(nodes=None).grow([3], Table([3], 0, vocabulary=50).expand)
    assert whole.drafted == 10 + 6 * 100


def test_children_that_are_never_shown_can_be_verified():
    (tree,) = Dynamic(depth=3, top_k=2, nodes=None).grow([0], Table([0], 1).expand)
    leaves = set(range(1, tree.size)) - set(tree.parents)
    assert any(tree.depths[leaf] < 3 for leaf in leaves)


def test_tokens_are_the_targets_where_the_draft_has_its_own_vocabulary():
    ids = [100, 7, 42, 99]
    table = Table([0], 5, vocabulary=4, ids=ids)
    (tree,) = Dynamic(depth=3, top_k=3, nodes=9).grow([0], table.expand, ids=torch.tensor(ids))
    assert scores(tree).keys() == brute(table, 0, 0, 3, 3, 9, ids).keys()


@pytest.mark.parametrize("value", [60.0, float("inf"), float("nan"), float("-inf")])
def test_it_stays_a_tree_whatever_the_draft_says(value):
    """Certain, overflowed, or out of its mind: ties and numbers that are none must not break the closure."""

    def expand(level: Level) -> torch.Tensor:
        logits = torch.full((*level.tokens.shape, VOCABULARY), -40.0)
        logits[..., 1] = value
        logits[:, ::2] = float("-inf") if value < 0 else logits[:, ::2]
        return logits

    for nodes in range(1, 12):
        (tree,) = Dynamic(depth=3, top_k=3, nodes=nodes).grow([0], expand)  # TokenTree refuses a node before its parent
        assert tree.drafted == nodes


@pytest.mark.parametrize(
    ("default", "options", "sizes"),
    [
        # max_nodes, max_expanded, levels
        ("beam", {}, (68, 64, 5)),
        ("dynamic", {}, (59, 60, 7)),
        ("beam", {"tree": "dynamic"}, (59, 60, 7)),
        ("beam", {"top_k": 3}, (57, 18, 7)),
        ("dynamic", {"widths": (1, 1, 1)}, (3, 2, 3)),
        ("dynamic", {"tree": "beam", "nodes": 9}, (9, 64, 5)),
        ("dynamic", {"depth": 1, "top_k": 4}, (4, 0, 1)),
        ("dynamic", {"depth": 3, "nodes": 5}, (5, 20, 3)),
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


def test_sampled_text_gets_a_wide_tree_unless_widths_are_given():
    for options, wide in (({}, True), ({"widths": (2, 2)}, False)):
        kind = TreeOptions(**options).kind("beam")
        tables = [Table([0], 0, vocabulary=60) for _ in range(2)]
        trees = [kind.grow([0], table.expand, sampled=s)[0] for s, table in zip((False, True), tables, strict=True)]
        sizes = [Counter(tree.depths[1:]) for tree in trees]
        assert (sizes[0] != sizes[1]) == wide
        assert [sum(s.values()) for s in sizes] == [sum(kind.widths), sum(kind.sampled_widths or kind.widths)]
        assert max(sum(s.values()) for s in sizes) == kind.max_nodes
