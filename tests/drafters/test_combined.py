"""Two drafters in one tree. That the output is the target's: tests/exact."""

from __future__ import annotations

from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longdraft.trees.tree import TokenTree, merge_trees, tree_from_paths

# --- trees ---


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(tree.size)}


continuations = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4)


@given(continuations, continuations)
def test_a_merged_tree_has_all_paths_once(one, two):
    a, b = tree_from_paths(9, one), tree_from_paths(9, two)
    merged = merge_trees(a, b)
    assert paths(merged) == paths(a) | paths(b)
    assert merged.size == len(paths(merged))


def test_a_common_node_gets_the_larger_probability():
    a = TokenTree((9, 1, 2), (-1, 0, 1), (0.0, log(0.2), log(0.9)))
    b = TokenTree((9, 1, 3), (-1, 0, 1), (0.0, log(0.6), log(0.1)))
    merged = merge_trees(a, b)
    assert merged.tokens == (9, 1, 2, 3) and [exp(x) for x in merged.logprobs] == pytest.approx([1, 0.6, 0.9, 0.1])


@given(continuations, st.lists(st.integers(0, 2), max_size=5))
def test_match_length(branches, tokens):
    tree = tree_from_paths(9, branches)
    known = paths(tree)
    assert tree.match_length(tokens) == max(n for n in range(len(tokens) + 1) if (9, *tokens[:n]) in known)
