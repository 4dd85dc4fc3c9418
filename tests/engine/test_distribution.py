"""Sampled acceptance has the target's distribution, for trees of many shapes and any processors.

Acceptance is random through the tokens that the target samples, and through nothing else. So its distribution is
computed: every sample is taken in every way that it can go, with its probability, and the result is compared with the
product of the target's processed distributions. That finds any error, however small, but it trusts the sampler:
tests/exact/test_laws.py samples. A wrong way of accepting has to fail.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from longdraft import Sampling
from longdraft.engine.accept import accept_path
from longdraft.engine.sampler import Sampler
from longdraft.trees.tree import TokenTree, chain_tree, tree_from_paths

# Tokens whose joint distribution is compared.
COMPUTED = 3
# A target that is a table: the next token's logits depend on the last two tokens, so its distributions are known.
VOCABULARY = 8
PROMPT = [3, 1, 3, 5]
TABLE = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4)) * 1.3
SETTINGS = {
    "plain": Sampling(1.0),
    "temperature": Sampling(0.7),
    "top-k": Sampling(1.0, top_k=3),
    "top-p": Sampling(1.0, top_p=0.8),
    "min-p": Sampling(1.0, min_p=0.15),
    "repetition penalty": Sampling(1.0, repetition_penalty=1.8),
    "all": Sampling(0.8, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.5),
}


def logits_after(text: list[int]) -> torch.Tensor:
    return TABLE[text[-2], text[-1]]


def tree_logits(tree: TokenTree) -> torch.Tensor:
    """(nodes, vocabulary) logits of a tree; the prompt ends with the root."""
    before = [PROMPT[-2], *(tree.tokens[parent] for parent in tree.parents[1:])]
    return TABLE[before, list(tree.tokens)]


def next_distribution(text: list[int], sampling: Sampling) -> torch.Tensor:
    """The target's processed distribution, computed by hand."""
    scores = sampling.processors()(torch.tensor([text]), logits_after(text)[None].clone())
    return torch.softmax(scores, -1)[0].double()


def text_distribution(sampling: Sampling, tokens: int) -> torch.Tensor:
    """(vocabulary,) * tokens: probability of each continuation in plain decoding."""

    def following(text: list[int], left: int) -> torch.Tensor:
        p = next_distribution(text, sampling)
        if left == 1:
            return p
        return torch.stack([p[t] * following([*text, t], left - 1) for t in range(VOCABULARY)])

    return following(PROMPT, tokens)


def random_trees(count: int) -> list[TokenTree]:
    g = torch.Generator().manual_seed(8)
    trees = []
    for _ in range(count):
        size = int(torch.randint(1, 13, (), generator=g))
        tokens = torch.randint(VOCABULARY, (size - 1,), generator=g).tolist()
        parents = [-1] + [int(torch.randint(i, (), generator=g)) for i in range(1, size)]
        trees.append(TokenTree((5, *tokens), tuple(parents)))
    return trees


# Each shape is a list of trees.
TREES = {
    "root only": [chain_tree(5, [])],
    "chain": [chain_tree(5, [2, 6, 1])],
    "binary": [tree_from_paths(5, itertools.product([2, 4], [6, 0], [1, 2]))],
    "wide": [tree_from_paths(5, itertools.product(range(7), [1, 2, 3]))],
    "beam": [tree_from_paths(5, [[2, 6, 1, 0], [2, 6, 4], [2, 3], [4, 4, 4], [1]])],
    "equal siblings": [TokenTree((5, 2, 2, 2, 6, 6, 3), (-1, 0, 0, 0, 1, 2, 2))],
    "random": random_trees(28),
}


class Unscripted(Exception):
    """The script has ended before this sample."""

    def __init__(self, distribution: torch.Tensor) -> None:
        self.distribution = distribution


class Scripted(Sampler):
    """Samples the tokens of a script, and computes their probability."""

    def __init__(self, sampling: Sampling, script: tuple[int, ...]) -> None:
        super().__init__(sampling.greedy, sampling.processors())
        self.script, self.chance, self.position = script, 1.0, 0

    def sample(self, text: torch.Tensor, logits: torch.Tensor) -> int:
        p = self.probabilities(text, logits).double()
        if self.position == len(self.script):
            raise Unscripted(p)
        token = self.script[self.position]
        self.position += 1
        self.chance *= float(p[token])
        return token


def written(tree: TokenTree, logits: torch.Tensor, sampler: Sampler, walk, count: int) -> list[int]:
    """``count`` tokens: plain decoding continues where the walk ends."""
    emitted_tokens: list[int] = []

    def enough(token: int) -> bool:
        emitted_tokens.append(token)
        return len(emitted_tokens) == count

    emitted = list(walk(tree, logits, sampler, lambda: torch.tensor(PROMPT), enough).token_ids)
    while len(emitted) < count:
        text = [*PROMPT, *emitted]
        emitted.append(sampler.sample(torch.tensor(text), logits_after(text)))
    return emitted


def accepted_distribution(tree: TokenTree, sampling: Sampling, walk=accept_path) -> torch.Tensor:
    """(vocabulary,) * COMPUTED: probability of each output."""
    logits, found, scripts = tree_logits(tree), torch.zeros([VOCABULARY] * COMPUTED, dtype=torch.double), [()]
    while scripts:
        sampler = Scripted(sampling, scripts.pop())
        try:
            text = written(tree, logits, sampler, walk, COMPUTED)
        except Unscripted as more:
            scripts += [(*sampler.script, token) for token in more.distribution.nonzero().flatten().tolist()]
        else:
            found[tuple(text)] += sampler.chance
    return found


@cache
def plain_distribution(setting: str, tokens: int) -> torch.Tensor:
    return text_distribution(SETTINGS[setting], tokens)


@pytest.mark.parametrize(
    ("shape", "setting"), [*(("random", s) for s in SETTINGS), *zip(list(TREES)[:-1], list(SETTINGS)[1:], strict=False)]
)
def test_accepted_text_has_the_targets_distribution(shape, setting):
    # Of the random trees a share each: as many settings meet all of them.
    trees = TREES[shape][list(SETTINGS).index(setting) :: len(SETTINGS)] if shape == "random" else TREES[shape]
    for tree in trees:
        found = accepted_distribution(tree, SETTINGS[setting])
        torch.testing.assert_close(found, plain_distribution(setting, COMPUTED), atol=1e-7, rtol=1e-4)


# --- the tests have teeth ---


def forgets_the_path(tree, logits, sampler, text, stop):
    """Shows processors the prompt alone at each node."""
    sample = sampler.sample
    sampler.sample = lambda upto, row: sample(upto[: len(PROMPT)], row)
    try:
        return accept_path(tree, logits, sampler, text, stop)
    finally:
        sampler.sample = sample


def test_a_wrong_acceptance_has_another_distribution():
    found = accepted_distribution(TREES["wide"][0], SETTINGS["repetition penalty"], forgets_the_path)
    assert (found - plain_distribution("repetition penalty", COMPUTED)).abs().max() > 1e-3
