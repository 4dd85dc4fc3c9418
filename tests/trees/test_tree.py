"""TokenTree and its builders, on random trees against definitions by path."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.trees.masks import padded_ancestor_mask
from longdraft.trees.tree import TokenTree, merge_trees, tree_from_paths


@st.composite
def trees(draw, max_size: int = 16) -> TokenTree:
    """Any tree over three tokens, so that siblings are often equal."""
    size = draw(st.integers(1, max_size))
    tokens = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
    logprobs = draw(st.sampled_from([(), tuple(-0.1 * i for i in range(size))]))
    return TokenTree(tuple(tokens), tuple(parents), logprobs)


def texts(tree: TokenTree) -> set[tuple[int, ...]]:
    """The token sequences from the root to every node."""
    return {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(tree.size)}


paths = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6)


# --- the tree ---


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 3))
def test_paths_depths_and_the_ancestor_mask_follow_parents(batch, extra):
    """Masks of a batch are padded: padding sees itself alone."""
    size = max(tree.size for tree in batch) + extra
    masks = padded_ancestor_mask(batch, size)
    assert masks.shape == (len(batch), size, size) and masks.dtype == torch.bool
    for mask, tree in zip(masks, batch, strict=True):
        for node in range(tree.size):
            path = tree.path(node)
            assert path[0] == 0 and path[-1] == node and tree.depths[node] == len(path) - 1
            assert all(tree.parents[b] == a and a < b for a, b in pairwise(path))
        for row in range(size):
            assert mask[row].nonzero().flatten().tolist() == (tree.path(row) if row < tree.size else [row])
        assert tree.is_chain == (tree.parents == tuple(range(-1, tree.size - 1)))


@given(trees())
def test_a_child_is_the_first_node_below_that_carries_the_token(tree):
    for node in range(tree.size):
        for token in range(4):
            below = [i for i in range(tree.size) if tree.parents[i] == node and tree.tokens[i] == token]
            assert tree.child(node, token) == (below[0] if below else None)


@given(trees(), st.integers(0, 6))
def test_limiting_the_depth_keeps_exactly_the_nodes_above_it(tree, max_depth):
    limited = tree.limit_depth(max_depth)
    kept = [i for i in range(tree.size) if tree.depths[i] <= max_depth]
    assert limited.tokens == tuple(tree.tokens[i] for i in kept)
    assert limited.depths == tuple(tree.depths[i] for i in kept)
    assert [limited.path(i) for i in range(limited.size)] == [[kept.index(j) for j in tree.path(i)] for i in kept]
    assert limited.logprobs == (tuple(tree.logprobs[i] for i in kept) if tree.logprobs else ())


NO_TREES = {
    "empty": ((), ()), "lengths differ": ((1, 2), (-1,)), "no root": ((1,), (0,)), "two roots": ((1, 2), (-1, -1)),
    "own parent": ((1, 2), (-1, 1)), "child before parent": ((1, 2, 3), (-1, 2, 0)), "below -1": ((1, 2), (-1, -2)),
    "one log-probability": ((1, 2), (-1, 0), (0.0,)),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TREES)
def test_what_makes_no_tree_is_refused(name):
    with pytest.raises(ValueError, match=r"parents|log-probabilities"):
        TokenTree(*NO_TREES[name])


# --- builders ---


@given(paths, paths, st.lists(st.integers(0, 2), max_size=5))
def test_a_union_holds_every_prefix_of_every_path_and_nothing_twice(one, two, tokens):
    a, b = (tree_from_paths(9, continuations) for continuations in (one, two))
    expected = {(9,)} | {(9, *path[:n]) for path in one for n in range(1, len(path) + 1)}
    assert texts(a) == expected and a.size == len(expected)
    assert a.match_length(tokens) == max(n for n in range(len(tokens) + 1) if (9, *tokens[:n]) in expected)
    merged = merge_trees(a, b)
    assert texts(merged) == expected | texts(b) and merged.size == len(texts(merged))


def test_a_common_node_of_two_trees_gets_the_larger_probability():
    a = TokenTree((9, 1, 2), (-1, 0, 1), (0.0, log(0.2), log(0.9)))
    b = TokenTree((9, 1, 3), (-1, 0, 1), (0.0, log(0.6), log(0.1)))
    merged = merge_trees(a, b)
    assert merged.tokens == (9, 1, 2, 3) and [exp(x) for x in merged.logprobs] == pytest.approx([1, 0.6, 0.9, 0.1])
