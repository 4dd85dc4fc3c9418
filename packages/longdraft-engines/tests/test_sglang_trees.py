"""Trees as SGLang's verification takes them, and the arguments of its server; without SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longdraft.errors import CapabilityError, CheckpointError, RequestError
from longdraft.trees.tree import TokenTree
from longdraft_engines.sglang.arguments import DRAFT_TOKENS, settle
from longdraft_engines.sglang.trees import tree_arrays
from tests.support.drafts import random_draft
from tests.support.tiny import tiny_model

NODES = 9


@st.composite
def trees(draw):
    """Of up to NODES nodes, in which no two children of a node carry the same token."""
    parents, taken, tokens = [-1], set(), [draw(st.integers(0, 5))]
    for i in range(1, draw(st.integers(1, NODES))):
        parent, token = draw(st.integers(0, i - 1)), draw(st.integers(0, 5))
        if (parent, token) in taken or parent >= len(parents):
            continue
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    return TokenTree(tuple(tokens), tuple(parents))


def links(mask):
    """What SGLang derives from one tree's mask: parents, depths, first children and next siblings; -1 for none."""
    n = len(mask)
    above = [[j for j in range(i) if mask[i][j]] for i in range(n)]
    parents = [max(a, default=-1) for a in above]
    first = [min((k for k in range(n) if i in above[k]), default=-1) for i in range(n)]
    after = [[k for k in range(i + 1, n) if parents[k] == parents[i] >= 0] for i in range(n)]
    return parents, [len(a) for a in above], first, [min(a, default=-1) for a in after]


def walk(tokens, first, siblings, wanted):
    """Nodes that a greedy verification accepts: at each depth the first sibling whose token the target wants."""
    node, path = 0, [0]
    while (child := first[node]) >= 0:
        while child >= 0 and tokens[child] != wanted(path):
            child = siblings[child]
        if child < 0:
            break
        node = child
        path.append(node)
    return path


@given(st.lists(trees(), min_size=1, max_size=3), st.lists(st.integers(0, 5), min_size=NODES, max_size=NODES))
def test_a_walk_by_the_mask_is_a_walk_in_the_tree(batch, says):
    tokens, mask = tree_arrays(batch, NODES)
    assert tokens.shape == (len(batch) * NODES,) and mask.shape == (len(batch) * NODES**2,)
    for tree, row, seen in zip(batch, tokens.reshape(-1, NODES), mask.reshape(-1, NODES, NODES), strict=True):
        for node in range(tree.size):  # every node sees its path from the root, and nothing else
            assert np.flatnonzero(seen[node]).tolist() == tree.path(node)
        parents, depths, first, siblings = links(seen.tolist())
        assert tuple(parents[: tree.size]) == tree.parents and tuple(depths[: tree.size]) == tree.depths
        led_to = [n for n in (*first, *siblings) if n >= 0]
        assert sorted(led_to) == list(range(1, tree.size))  # each drafted node once, and none that fills up
        path, node = [0], 0
        while (child := tree.child(node, says[node])) is not None:
            path.append(node := child)
        assert walk(row.tolist(), first, siblings, lambda path: says[path[-1]]) == path


def test_a_tree_that_is_too_large_is_refused():
    with pytest.raises(ValueError):
        tree_arrays([TokenTree((1, 2, 3), (-1, 0, 0))], 2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return str(random_draft(tmp_path_factory.mktemp("draft"), tiny_model()))


def server(draft, **over):
    return SimpleNamespace(**{
        "speculative_draft_model_path": draft, "speculative_num_draft_tokens": None, "speculative_eagle_topk": None,
        "speculative_num_steps": None, "speculative_adaptive": False, "max_running_requests": None, "tp_size": 1,
        "pp_size": 1, "dp_size": 1, "page_size": None, "attention_backend": None, "kv_cache_dtype": "auto",
        "disaggregation_mode": "null", "device": "cuda", "enable_mixed_chunk": True, "disable_overlap_schedule": False,
    } | over)  # fmt: skip


def test_arguments_are_filled_in(draft):
    settle(args := server(draft))
    assert args.speculative_num_draft_tokens == DRAFT_TOKENS
    assert 1 < args.speculative_num_steps * args.speculative_eagle_topk <= DRAFT_TOKENS  # what a request reserves
    assert args.speculative_eagle_topk > 1 and args.max_running_requests and not args.enable_mixed_chunk
    assert not args.disable_overlap_schedule
    settle(args := server(draft, speculative_num_draft_tokens=8, max_running_requests=3, device="cpu"))
    assert (args.speculative_num_draft_tokens, args.max_running_requests) == (8, 3) and args.disable_overlap_schedule
    settle(server(draft, page_size=16, attention_backend="flashinfer"))


@pytest.mark.parametrize(
    ("over", "error", "says"),
    [
        ({"speculative_draft_model_path": None}, RequestError, "needs a draft"),
        ({"speculative_draft_model_path": "nowhere"}, CheckpointError, "nowhere"),
        ({"speculative_num_draft_tokens": 1}, RequestError, "2 or more"),
        ({"tp_size": 2}, CapabilityError, "--tp-size 2"),
        ({"pp_size": 2}, CapabilityError, "--pp-size 2"),
        ({"dp_size": 2}, CapabilityError, "--dp-size 2"),
        ({"page_size": 16, "attention_backend": "triton"}, CapabilityError, "--page-size 1"),
        ({"kv_cache_dtype": "fp8_e5m2"}, CapabilityError, "fp8_e5m2"),
        ({"speculative_adaptive": True}, CapabilityError, "adaptive"),
        ({"disaggregation_mode": "decode"}, CapabilityError, "disaggregation"),
        ({"device": "npu"}, CapabilityError, "npu"),
    ],
)
def test_what_is_not_served_is_said(draft, over, error, says):
    with pytest.raises(error, match=says):
        settle(server(draft, **over))
