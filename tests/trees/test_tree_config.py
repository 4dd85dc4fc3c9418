"""Every kind of tree against its definition, what holds of all kinds, and the options that choose between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.trees.level import TreeLevel
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NO_LIMIT, NodeLimit
from longdraft.trees.tree_config import CHAIN_LENGTH, MAX_CHAIN_LENGTH, beam, chain, dynamic, opt, static
from tests.trees.reference import VOCABULARY, Table, by_definition, certain, expander, scores


def priced(depth, min_expected_gain):
    return replace(chain(depth), min_expected_gain=min_expected_gain)


def watching(draft, on_call):
    """The same draft; every level that it is asked about goes to ``on_call`` first."""
    return replace(draft, logits_or_topk=lambda level, k: on_call(level) or draft.logits_or_topk(level, k))


nodes = st.integers(1, 40)
widths = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
opts = st.builds(
    opt,
    nodes=nodes,
    depth=st.integers(1, 5),
    threshold=st.sampled_from([0.0, 0.02, 0.2, 0.5, 0.7]),
    top_k=st.integers(1, 12),
)
kinds = st.one_of(
    st.builds(beam, widths=widths, nodes=st.none() | nodes),
    st.builds(static, widths=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple), nodes=st.none() | nodes),
    st.builds(dynamic, depth=st.integers(1, 4), top_k=st.integers(1, 9), nodes=st.none() | nodes),
    st.builds(priced, depth=st.integers(1, 6), min_expected_gain=st.sampled_from([0.0, 0.05, 0.3])),
    opts,
)
SMALL = [
    beam(widths=(2, 3, 3)), static(widths=(3, 2, 2)), dynamic(depth=3, top_k=3, nodes=9), chain(depth=3),
    opt(nodes=9, depth=3, threshold=0.0, top_k=3),
]  # fmt: skip
IDS = [100, 7, 42, 99, 3, 12, 61]  # of a draft's own vocabulary


@given(kinds, st.lists(st.integers(0, 5), min_size=1, max_size=3), st.sampled_from([None, IDS]), st.integers(0, 10**6))
def test_a_tree_is_what_its_definition_gives(kind, depths, ids, seed):
    """Whatever else is in the batch."""
    depths = [min(depth, kind.depth) for depth in depths]
    roots, table = list(range(len(depths))), Table(seed)
    trees = kind.grow(roots, expander(table.draft_logits, ids and torch.tensor(ids)), depths)
    for b, (tree, depth) in enumerate(zip(trees, depths, strict=True)):
        expected, levels = by_definition(kind, table, b, roots[b], depth, ids)
        found = scores(tree)
        assert tree.tokens[0] == roots[b] and tree.logprobs[0] == 0.0
        assert found.keys() == expected.keys() and tree.num_draft_tokens == len(found) <= kind.max_nodes
        assert all(x == pytest.approx(expected[path], abs=1e-4) for path, x in found.items())
        # No forward more than the definition makes; fewer if no node of another level could be among the best.
        assert sum(b in level.sequence_indices for level in table.calls) <= levels
    assert sum(level.tokens.shape[1] for level in table.calls[1:]) <= kind.max_expanded_nodes


@pytest.mark.parametrize("value", [60.0, float("inf"), float("nan"), float("-inf")])
@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
def test_it_stays_a_tree_whatever_the_draft_says(kind, value):
    """Certain, overflowed or broken: ties and NaN must leave it closed under parents, or TokenTree raises."""

    def expand(level: TreeLevel) -> torch.Tensor:
        logits = torch.full((*level.tokens.shape, VOCABULARY), -40.0)
        logits[..., 1] = value
        logits[:, ::2] = float("-inf") if value < 0 else logits[:, ::2]
        return logits

    limited = {"chain": chain, "opt": lambda count: opt(count, 3, 0.0, 3)}
    for count in range(1, kind.max_nodes + 1):
        (tree,) = limited.get(kind.name, lambda count: replace(kind, nodes=count))(count).grow([0], expander(expand))
        assert 1 <= tree.num_draft_tokens <= count and (tree.num_draft_tokens == count or kind.name == "opt")


def test_nodes_whose_children_cannot_be_among_the_best_are_not_expanded():
    """One node of a level is better than the third best so far. At the third level it is the third best itself."""
    calls: list[int] = []
    watched = watching(certain(0.99), lambda level: calls.append(level.tokens.shape[1]))
    opt(nodes=3, depth=4, threshold=0.5, top_k=3).grow([0, 0], watched)
    assert calls == [1, 1, 1]


# --- options ---


@pytest.mark.parametrize(
    ("default", "options", "kind", "sizes"),
    [
        # max_nodes, max_expanded_nodes, levels
        ("beam", {}, "beam", (68, 52, 5)),
        ("dynamic", {}, "dynamic", (59, 70, 8)),
        ("opt", {}, "opt", (50, 90, 10)),
        ("chain", {}, "chain", (CHAIN_LENGTH, CHAIN_LENGTH - 1, CHAIN_LENGTH)),
        ("beam", {"tree": "dynamic"}, "dynamic", (59, 70, 8)),
        ("beam", {"top_k": 3}, "dynamic", (59, 21, 8)),
        ("dynamic", {"widths": (1, 1, 1)}, "beam", (3, 2, 3)),
        ("dynamic", {"tree": "beam", "nodes": 9}, "beam", (9, 52, 5)),
        ("dynamic", {"depth": 1, "top_k": 4}, "dynamic", (4, 0, 1)),
        ("dynamic", {"depth": 3, "nodes": 5}, "dynamic", (5, 20, 3)),
        ("beam", {"tree": "opt"}, "opt", (50, 90, 10)),
        ("dynamic", {"threshold": 0.2}, "opt", (50, 90, 10)),
        ("opt", {"depth": 3, "top_k": 4}, "opt", (50, 8, 3)),
        ("opt", {"nodes": 6, "depth": 2}, "opt", (6, 6, 2)),
        ("opt", {"depth": 1, "threshold": 0}, "opt", (50, 0, 1)),
        ("chain", {"top_k": 3}, "dynamic", (59, 21, 8)),
        ("chain", {"widths": (2, 2)}, "beam", (4, 2, 2)),
        ("chain", {"threshold": 0.5}, "opt", (50, 90, 10)),
        ("chain", {"depth": 7}, "chain", (7, 6, 7)),
        ("chain", {"nodes": 2}, "chain", (2, 3, 4)),
    ],
    ids=str,
)
def test_options_choose_a_kind_and_its_sizes(default, options, kind, sizes):
    made = TreeOptions(**options).config(default)
    assert made.name == kind and (made.max_nodes, made.max_expanded_nodes, made.depth) == sizes
    (tree,) = made.grow([0], Table(0, vocabulary=30).expander, [100])
    assert tree.num_draft_tokens <= made.max_nodes and max(tree.depths) <= made.depth


def test_a_lower_threshold_makes_a_deeper_tree():
    made = [TreeOptions(threshold=t, nodes=20).config("opt").grow([0], certain(0.6))[0] for t in (2.0, 0.7, 0.3, 0.1)]
    deepest = [max(tree.depths) for tree in made]
    assert deepest[0] == 1 and deepest == sorted(deepest) and deepest[-1] > deepest[1]


def test_a_planner_sizes_a_tree_unless_the_user_chose_it():
    kind = TreeOptions().config("chain")
    assert kind.fit(None) is kind and kind.fit(NO_LIMIT).max_nodes == MAX_CHAIN_LENGTH

    def num_draft_tokens(kind, sure, limit):
        return kind.fit(NO_LIMIT).fit(limit).grow([0], certain(sure), [30])[0].num_draft_tokens

    assert num_draft_tokens(kind, 0.9, NodeLimit(8, 0.7)) == 4  # 0.9^4 = 0.66
    assert num_draft_tokens(kind, 0.99, NodeLimit(8, 0.7)) == 8
    assert num_draft_tokens(TreeOptions(depth=6).config("chain"), 0.5, NodeLimit(2, 0.9)) == 6
    for default in ("beam", "static", "dynamic"):
        fitted = TreeOptions().config(default).fit(NodeLimit(8, 0.7))
        assert fitted.name == "opt" and fitted.nodes == 8 and fitted.threshold == 0.7


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tree": "chain", "top_k": 3}, "top_k"),
        ({"tree": "chain", "widths": (1, 1)}, "widths"),
        ({"tree": "chain", "threshold": 0.5}, "threshold"),
        ({"tree": "opt", "widths": (2, 2)}, "widths"),
        ({"widths": (2, 2), "threshold": 0.5}, "threshold"),
        ({"tree": "dynamic", "threshold": 0.5}, "threshold"),
    ],
    ids=str,
)
def test_options_that_make_no_tree(options, word):
    for default in ("beam", "chain", "dynamic", "opt"):
        with pytest.raises(ValueError, match=word):
            TreeOptions(**options).config(default)
