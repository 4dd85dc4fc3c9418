"""The beam tree against one grown by looking at every candidate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.trees.beam import Beam
from longdraft.trees.level import Level
from longdraft.trees.tree import TokenTree

VOCABULARY = 7


class Table:
    """A draft whose logits depend on the path: a fixed random row for each sequence and path."""

    def __init__(self, roots: list[int], seed: int, vocabulary: int = VOCABULARY, ids: list[int] | None = None) -> None:
        self.seed, self.vocabulary = seed, vocabulary
        self.draft_id = {t: i for i, t in enumerate(ids)} if ids else {}
        self.paths: dict[int, list[tuple[int, ...]]] = {}
        self.calls: list[Level] = []

    def row(self, sequence: int, path: tuple[int, ...]) -> torch.Tensor:
        g = torch.Generator().manual_seed(hash((self.seed, sequence, path)) % 2**31)
        return 2 * torch.randn(self.vocabulary, generator=g)

    def expand(self, level: Level) -> torch.Tensor:
        self.calls.append(level)
        out = []
        for i, sequence in enumerate(level.rows):
            above = self.paths.get(sequence)
            tokens, parents = level.tokens[i].tolist(), level.parents[i].tolist()
            self.paths[sequence] = [(above[p] if above else ()) + (t,) for t, p in zip(tokens, parents, strict=True)]
            out.append(torch.stack([self.row(sequence, path) for path in self.paths[sequence]]))
        return torch.stack(out)


def brute(table: Table, sequence: int, root: int, widths, depth, ids) -> dict[tuple[int, ...], tuple[float, float]]:
    """path -> (log-probability given its parent, cumulative score)."""
    found: dict[tuple[int, ...], tuple[float, float]] = {}
    level = {(root,): 0.0}
    for width in widths[:depth]:
        candidates = {}
        for path, score in level.items():
            logp = torch.log_softmax(table.row(sequence, path), -1).tolist()
            for i, x in enumerate(logp):
                candidates[(*path, ids[i] if ids else i)] = (x, score + x)
        best = sorted(candidates.items(), key=lambda c: -c[1][1])[:width]
        found |= dict(best)
        level = {path: score for path, (_, score) in best}
    return found


def described(tree: TokenTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.tokens[i] for i in tree.path(n)): tree.log_probs[n] for n in range(1, tree.size)}


widths = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(widths, st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 10**6))
def test_it_is_the_tree_that_looking_at_every_candidate_gives(widths, depths, seed):
    depths = [min(d, len(widths)) for d in depths]
    roots = list(range(len(depths)))
    table = Table(roots, seed)
    trees = Beam(widths=tuple(widths)).grow(roots, table.expand, depths)
    for b, (tree, depth) in enumerate(zip(trees, depths, strict=True)):
        expected = brute(table, b, roots[b], widths, depth, None)
        got = described(tree)
        assert tree.tokens[0] == roots[b] and tree.log_probs[0] == 0.0
        assert got.keys() == expected.keys() and tree.drafted == len(got)
        for path, x in got.items():
            assert x == pytest.approx(expected[path][0], abs=1e-5)
        # Closed under parents, and no level wider than asked for.
        assert all(path[:-1] in got for path in got if len(path) > 2)
        for d in range(1, depth + 1):
            assert tree.depths.count(d) <= widths[d - 1]


@given(widths, st.integers(1, 20), st.integers(0, 10**6))
def test_a_budget_keeps_the_best_nodes(widths, nodes, seed):
    (whole,) = Beam(widths=tuple(widths)).grow([0], Table([0], seed).expand)
    (tree,) = Beam(widths=tuple(widths), nodes=nodes).grow([0], Table([0], seed).expand)
    assert tree.drafted == min(nodes, whole.drafted)

    def scores(t):
        return {path: sum(described(t)[path[:n]] for n in range(2, len(path) + 1)) for path in described(t)}

    kept, every = scores(tree), scores(whole)
    assert kept.keys() <= every.keys()
    best = sorted(every.values(), reverse=True)[: tree.drafted]
    assert sorted(kept.values(), reverse=True) == pytest.approx(best)


def test_the_papers_widths_give_68_nodes_in_five_forwards():
    table = Table([3], 0, vocabulary=50)
    (tree,) = Beam(widths=(4, 16, 16, 16, 16)).grow([3], table.expand)
    assert tree.drafted == 68
    assert [(level.depth, level.tokens.shape[1]) for level in table.calls] == [
        (0, 1),
        (1, 4),
        (2, 16),
        (3, 16),
        (4, 16),
    ]


def test_sequences_leave_when_their_tree_is_deep_enough():
    table = Table([1, 2, 3], 0)
    trees = Beam(widths=(2, 2, 2)).grow([1, 2, 3], table.expand, [3, 0, 1])
    assert [max(t.depths) for t in trees] == [3, 0, 1]
    assert [level.rows for level in table.calls] == [(0, 2), (0,), (0,)]


def test_tokens_are_the_targets_where_the_draft_has_its_own_vocabulary():
    ids = [100, 7, 42, 99]
    table = Table([0], 5, vocabulary=4, ids=ids)
    (tree,) = Beam(widths=(3, 3)).grow([0], table.expand, ids=torch.tensor(ids))
    assert described(tree).keys() == brute(table, 0, 0, (3, 3), 2, ids).keys()


def test_a_certain_draft_stays_closed_under_parents():
    """Children as likely as their parents: rounding and ties must not put them first."""

    def expand(level: Level) -> torch.Tensor:
        logits = torch.full((*level.tokens.shape, 5), -40.0)
        logits[..., 1] = 60.0
        return logits

    for nodes in range(1, 8):
        (tree,) = Beam(widths=(2, 3, 3), nodes=nodes).grow([0], expand)
        assert tree.drafted == nodes
    (tree,) = Beam(widths=(2, 3, 3), nodes=3).grow([0], expand)
    assert tree.tokens == (0, 1, 1, 1) and tree.is_chain
