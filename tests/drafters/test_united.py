"""Two drafters in one tree. That the output is the target's: tests/exact."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft import Sampling, Speculator
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Sampler
from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import TokenTree, merged, union
from tests.support.drafts import random_draft, random_eagle3, small_lm
from tests.support.events import decoded
from tests.support.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
METHODS = ["longspec", "eagle3", "small-lm"]
methods = pytest.mark.parametrize("method", METHODS)


def pair(method, tmp_path, **options):
    model = tiny_model(vocab=11, layers=6, dtype=torch.float64)
    draft = {
        "longspec": lambda: random_draft(tmp_path, model, window=16),
        "eagle3": lambda: random_eagle3(tmp_path, model),
        "small-lm": lambda: small_lm(tmp_path, 11),
    }[method]()
    return Speculator(method, target=model, draft=draft, lookup=True, **options), Speculator("ar", target=model)


@methods
def test_it_proposes_what_either_does(tmp_path, method):
    """A text that repeats: the lookup finds it, whatever a random draft says."""
    spec, _ = pair(method, tmp_path, widths=(2, 2), plan="fixed")
    drafter = spec.recipe().drafter()
    trees, propose = [], drafter.propose
    own = {"unpaid": [], "paid": []}
    for name in own:
        part = getattr(drafter, name)
        part.propose = lambda s, b=None, f=part.propose, n=name: own[n].append(f(s, b)) or own[n][-1]
    drafter.propose = lambda s, b=None: trees.append(propose(s, b)) or trees[-1]
    s = Sequence(0, PROMPTS[0], 24, sampler=Sampler(True, Sampling().processors()))
    decoded(Engine(spec.runner(), drafter), [s])
    assert len(trees) > 3
    for (whole,), (free,), (paid,) in zip(trees, own["unpaid"], own["paid"], strict=True):
        assert paths(whole) == paths(free) | paths(paid)
        assert whole.drafted <= drafter.max_nodes


# --- trees ---


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(tree.size)}


continuations = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4)


@given(continuations, continuations)
def test_a_merged_tree_has_all_paths_once(one, two):
    a, b = union(9, one), union(9, two)
    whole = merged(a, b)
    assert paths(whole) == paths(a) | paths(b)
    assert whole.size == len(paths(whole))


def test_the_surer_drafter_counts():
    a = TokenTree((9, 1, 2), (-1, 0, 1), (0.0, log(0.2), log(0.9)))
    b = TokenTree((9, 1, 3), (-1, 0, 1), (0.0, log(0.6), log(0.1)))
    whole = merged(a, b)
    assert whole.tokens == (9, 1, 2, 3) and [exp(x) for x in whole.log_probs] == pytest.approx([1, 0.6, 0.9, 0.1])


@given(continuations, st.lists(st.integers(0, 2), max_size=5))
def test_how_far_a_text_follows_a_tree(branches, text):
    tree = union(9, branches)
    known = paths(tree)
    assert tree.follows(text) == max(n for n in range(len(text) + 1) if (9, *text[:n]) in known)
