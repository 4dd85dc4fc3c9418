"""Sampled acceptance has the target's distribution, for trees of many shapes and any processors.

Acceptance is random through the tokens that the target picks, and through nothing else. So its law is computed: every
pick is taken in every way that it can go, with its probability, and what comes out is compared with the product of the
target's processed distributions. That finds any error, however small, but it takes the picks for what they say they
are. So a few cases are drawn, 10,000 times each. Wrong ways of accepting, among them those of published code, have to
fail.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from transformers import LogitsProcessorList

from longdraft.engine.accept import Accepted, accept
from longdraft.engine.draws import OwnDraws
from longdraft.engine.sampler import Sampler, Sampling
from longdraft.trees.builders import chain, union
from longdraft.trees.tree import TokenTree
from tests import chi_square
from tests.engine.table_target import PROMPT, SETTINGS, VOCABULARY, Memory, logits_after, text_law, tree_logits

DRAWS = 10_000
# Tokens whose joint law is compared: exactly, and drawn.
WRITTEN, DRAWN = 3, 2


def random_trees(count: int) -> list[TokenTree]:
    g = torch.Generator().manual_seed(8)
    made = []
    for _ in range(count):
        size = int(torch.randint(1, 13, (), generator=g))
        tokens = torch.randint(VOCABULARY, (size - 1,), generator=g).tolist()
        parents = [-1] + [int(torch.randint(i, (), generator=g)) for i in range(1, size)]
        made.append(TokenTree((5, *tokens), tuple(parents)))
    return made


# Each shape is a list of trees.
TREES = {
    "root only": [chain(5, [])],
    "chain": [chain(5, [2, 6, 1])],
    "binary": [union(5, itertools.product([2, 4], [6, 0], [1, 2]))],
    "wide": [union(5, itertools.product(range(7), [1, 2, 3]))],
    "beam": [union(5, [[2, 6, 1, 0], [2, 6, 4], [2, 3], [4, 4, 4], [1]])],
    "equal siblings": [TokenTree((5, 2, 2, 2, 6, 6, 3), (-1, 0, 0, 0, 1, 2, 2))],
    "random": random_trees(60),
}


class NotSaid(Exception):
    """A script ends before this pick."""

    def __init__(self, law: torch.Tensor) -> None:
        self.law = law


class Scripted(Sampler):
    """Picks what a script says, and knows how likely that is."""

    def __init__(self, sampling: Sampling, script: tuple[int, ...]) -> None:
        super().__init__(sampling.greedy, sampling.processors())
        self.script, self.chance, self.said = script, 1.0, 0

    def sample(self, text: torch.Tensor, logits: torch.Tensor) -> int:
        law = self.distribution(text, logits).double()
        if self.said == len(self.script):
            raise NotSaid(law)
        token = self.script[self.said]
        self.said += 1
        self.chance *= float(law[token])
        return token


def written(tree: TokenTree, logits: torch.Tensor, sampler: Sampler, walk, count: int) -> list[int]:
    """Text of so many tokens: plain decoding goes on where a walk ends."""
    said: list[int] = []

    def enough(token: int) -> bool:
        said.append(token)
        return len(said) == count

    emitted = list(walk(tree, logits, sampler, lambda: torch.tensor(PROMPT), enough).tokens)
    while len(emitted) < count:
        text = [*PROMPT, *emitted]
        emitted.append(sampler.sample(torch.tensor(text), logits_after(text)))
    return emitted


def accepted_law(tree: TokenTree, sampling: Sampling, walk=accept) -> torch.Tensor:
    """(vocabulary,) * WRITTEN: how likely each text comes out."""
    logits, found, scripts = tree_logits(tree), torch.zeros([VOCABULARY] * WRITTEN, dtype=torch.double), [()]
    while scripts:
        sampler = Scripted(sampling, scripts.pop())
        try:
            text = written(tree, logits, sampler, walk, WRITTEN)
        except NotSaid as more:
            scripts += [(*sampler.script, token) for token in more.law.nonzero().flatten().tolist()]
        else:
            found[tuple(text)] += sampler.chance
    return found


@cache
def plain_law(setting: str, tokens: int) -> torch.Tensor:
    return text_law(SETTINGS[setting], tokens)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("shape", TREES)
def test_accepted_text_has_the_targets_law(shape, setting):
    # Of the random trees a share each: as many settings meet all of them.
    trees = TREES[shape][list(SETTINGS).index(setting) :: len(SETTINGS)] if shape == "random" else TREES[shape]
    for tree in trees:
        found = accepted_law(tree, SETTINGS[setting])
        torch.testing.assert_close(found, plain_law(setting, WRITTEN), atol=1e-7, rtol=1e-4)


def drawn_p_value(shape: str, setting: str, walk=accept, seed: int = 0) -> float:
    """Of the draws, the trees of a shape taken in turn."""
    sampling = SETTINGS[setting]
    sampler = Sampler(sampling.greedy, Memory(sampling.processors()), OwnDraws(torch.Generator().manual_seed(seed)))
    cases = [(tree, tree_logits(tree)) for tree in TREES[shape]]
    counts = torch.zeros([VOCABULARY] * DRAWN)
    for draw in range(DRAWS):
        counts[tuple(written(*cases[draw % len(cases)], sampler, walk, DRAWN))] += 1
    return chi_square.p_value(counts, plain_law(setting, DRAWN), cells=9)


# One right case in a hundred falls below 0.01; over 40 seeds the p-values of a case were uniform.
@pytest.mark.parametrize(("shape", "setting"), [("random", "plain"), ("beam", "all")])
def test_sampled_output_has_the_targets_distribution(shape, setting):
    assert drawn_p_value(shape, setting, seed=100 + list(TREES).index(shape)) > 0.01


# --- the tests have teeth ---

COIN = torch.Generator().manual_seed(5)  # what the wrong acceptances toss


def takes_the_first_child(tree, logits, sampler, text, stop):
    """Always accepts the first drafted child."""
    return Accepted((0, 1), (tree.tokens[1], sampler.sample(torch.tensor([*PROMPT, tree.tokens[1]]), logits[1])))


def sometimes_takes_the_first_child(tree, logits, sampler, text, stop):
    """Accepts it one time in twenty without asking the target."""
    if torch.rand((), generator=COIN) < 0.05:
        return takes_the_first_child(tree, logits, sampler, text, stop)
    return accept(tree, logits, sampler, text, stop)


def tries_each_child(tree, logits, sampler, text, stop):
    """Accepts each child with its own probability, one after the other, and forgets to take those from the rest."""
    p = torch.softmax(sampler.processors(text()[None], logits[0][None].clone()), -1)[0]
    for node in (i for i, parent in enumerate(tree.parents) if parent == 0):
        if torch.rand((), generator=COIN) < p[tree.tokens[node]]:
            return Accepted((0,), (tree.tokens[node],))
    return Accepted((0,), (sampler.sample(text(), logits[0]),))


def argmax_of_the_draft_first(tree, logits, sampler, text, stop):
    """Walks greedily and draws only where it leaves the tree: typical of code that was tested at temperature 0."""
    best = int(logits[0].argmax())
    if tree.child(0, best) is not None:
        node = tree.child(0, best)
        return Accepted((0, node), (best, sampler.sample(torch.tensor([*PROMPT, best]), logits[node])))
    return accept(tree, logits, sampler, text, stop)


def forgets_the_path(tree, logits, sampler, text, stop):
    """Lets processors see the prompt alone at every node."""
    pick = sampler.sample
    sampler.sample = lambda upto, row: pick(upto[: len(PROMPT)], row)
    try:
        return accept(tree, logits, sampler, text, stop)
    finally:
        sampler.sample = pick


def forgets_the_processors(tree, logits, sampler, text, stop):
    """Draws from the raw logits."""
    own, sampler.processors = sampler.processors, LogitsProcessorList()
    try:
        return accept(tree, logits, sampler, text, stop)
    finally:
        sampler.processors = own


@pytest.mark.parametrize(
    ("wrong", "shape", "setting"),
    [
        (takes_the_first_child, "chain", "plain"),
        (argmax_of_the_draft_first, "wide", "plain"),
        (forgets_the_path, "wide", "repetition penalty"),
        (forgets_the_processors, "beam", "min-p"),
        (forgets_the_processors, "beam", "temperature"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_acceptance_has_another_law(wrong, shape, setting):
    (tree,) = TREES[shape]
    found = accepted_law(tree, SETTINGS[setting], wrong)
    assert (found - plain_law(setting, WRITTEN)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("wrong", "shape", "setting"),
    [(sometimes_takes_the_first_child, "binary", "plain"), (tries_each_child, "wide", "temperature")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_acceptance_is_seen_in_its_draws(wrong, shape, setting):
    assert drawn_p_value(shape, setting, wrong) < 1e-6
