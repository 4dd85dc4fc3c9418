"""Acceptance gives the target's own output: greedy by brute force, sampled by chi-square."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from longdraft.trees.builders import chain, static, union
from longdraft.trees.tree import TokenTree
from longdraft.verify.acceptance import Accepted, accept
from longdraft.verify.sampling import Picker, Sampling

VOCABULARY = 8
PROMPT = [3, 1, 3, 5]
DRAWS = 20_000
# The target: the next token's logits depend on the last two tokens.
TABLE = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4)) * 1.3

TREES = {
    "root only": chain(5, []),
    "chain": chain(5, [2, 6, 1]),
    "binary": static(5, [[2, 4], [6, 0], [1, 2]], [2, 2, 2]),
    "wide": static(5, [list(range(7)), [1, 2, 3]], [7, 3]),
    "beam": union(5, [[2, 6, 1, 0], [2, 6, 4], [2, 3], [4, 4, 4], [1]]),
    "equal siblings": TokenTree((5, 2, 2, 6, 6), (-1, 0, 0, 1, 2)),
}
SETTINGS = {
    "temperature": Sampling(0.7),
    "plain": Sampling(1.0),
    "top-k": Sampling(1.0, top_k=3),
    "top-p": Sampling(1.0, top_p=0.8),
    "min-p": Sampling(1.0, min_p=0.15),
    "repetition penalty": Sampling(1.0, repetition_penalty=1.8),
    "all": Sampling(0.8, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.5),
}
CASES = [(tree, "all") for tree in TREES] + [("beam", s) for s in SETTINGS if s != "all"] + [("chain", "plain")]


def logits_after(text):
    return TABLE[text[-2], text[-1]]


def tree_logits(tree, text):
    """(nodes, vocabulary): what one forward over the tree behind ``text`` gives; ``text`` ends with the root."""
    return torch.stack(
        [logits_after(text + [tree.tokens[i] for i in tree.path(node)[1:]]) for node in range(tree.size)]
    )


def next_distribution(text, sampling):
    """The target's processed distribution, computed plainly."""
    scores = sampling.processors()(torch.tensor([text]), logits_after(text)[None].clone())
    return torch.softmax(scores, -1)[0].double()


def two_tokens(tree, logits, picker, walk=accept):
    """The first two emitted tokens; plain decoding takes over when the walk ends after one."""
    emitted = list(walk(tree, logits, picker, lambda: torch.tensor(PROMPT)).tokens)
    if len(emitted) == 1:
        text = [*PROMPT, *emitted]
        emitted.append(picker.pick(torch.tensor(text), logits_after(text)))
    return emitted[0], emitted[1]


def p_value(tree, sampling, walk=accept):
    """Chi-square of the joint distribution of the first two tokens against plain decoding."""
    picker = Picker(sampling.greedy, sampling.processors(), torch.Generator().manual_seed(0))
    logits = tree_logits(tree, PROMPT)
    counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.double)
    for _ in range(DRAWS):
        counts[two_tokens(tree, logits, picker, walk)] += 1
    first = next_distribution(PROMPT, sampling)
    second = torch.stack([next_distribution([*PROMPT, a], sampling) for a in range(VOCABULARY)])
    expected = (first[:, None] * second).flatten() * DRAWS
    counts = counts.flatten()
    assert counts[expected == 0].sum() == 0, "a token was emitted that the processors rule out"
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    return float(chisquare(observed[keep], expected[keep] * observed.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize(("tree", "setting"), CASES)
def test_sampled_output_has_the_targets_distribution(tree, setting):
    assert p_value(TREES[tree], SETTINGS[setting]) > 0.01


def test_the_chi_square_test_rejects_a_wrong_acceptance():
    def eager(tree, logits, picker, text):
        """Takes the first drafted child half of the time, whatever the target says."""
        if torch.rand((), generator=picker.generator) < 0.5:
            return accept(tree, logits, picker, text)
        return Accepted((0, 1), (tree.tokens[1], picker.pick(text(), logits[1])))

    assert p_value(TREES["chain"], SETTINGS["plain"], eager) < 1e-6


def test_the_chi_square_test_rejects_penalties_that_forget_the_path():
    def forgetful(tree, logits, picker, text):
        class Blind(Picker):
            def pick(self, upto, row):
                return super().pick(upto[: len(PROMPT)], row)

        return accept(tree, logits, Blind(picker.greedy, picker.processors, picker.generator), text)

    assert p_value(TREES["wide"], SETTINGS["repetition penalty"], forgetful) < 1e-6


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.8)])
def test_greedy_walks_as_far_as_the_target_agrees(tree, sampling):
    tree = TREES[tree]
    plain, text = [], list(PROMPT)
    for _ in range(6):
        plain.append(int(next_distribution(text, sampling).argmax()))
        text.append(plain[-1])
    paths = {tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(tree.size)}
    longest = max(k for k in range(6) if tuple(plain[:k]) in paths)
    got = accept(tree, tree_logits(tree, PROMPT), Picker(True, sampling.processors()), lambda: torch.tensor(PROMPT))
    assert list(got.tokens) == plain[: longest + 1]
    assert [tree.tokens[i] for i in got.path[1:]] == plain[:longest]
    assert got.path == tuple(tree.path(got.path[-1])) and got.from_draft == longest


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_seed_gives_the_same_tokens_whatever_the_tree(setting):
    sampling = SETTINGS[setting]
    outcomes = set()
    for tree in TREES.values():
        picker = Picker(False, sampling.processors(), torch.Generator().manual_seed(3))
        logits = tree_logits(tree, PROMPT)
        outcomes.add(tuple(two_tokens(tree, logits, picker)))
    assert len(outcomes) == 1


def test_nothing_is_picked_after_a_stop():
    tree = chain(5, [int(logits_after(PROMPT).argmax()), 0, 1])
    logits = tree_logits(tree, PROMPT)
    got = accept(tree, logits, Picker(True, Sampling().processors()), lambda: torch.tensor(PROMPT), lambda token: True)
    assert got.tokens == (tree.tokens[1],) and got.path == (0,)


def test_a_processor_is_called_once_a_token_with_the_text_before_it():
    seen = []

    def remember(ids, scores):
        seen.append(ids[0].tolist())
        return scores

    picker = Picker(True, Sampling().processors())
    picker.processors.append(remember)
    best = int(logits_after(PROMPT).argmax())
    tree = union(5, [[best, 0], [best, 1], [best, 2], [(best + 1) % VOCABULARY]])
    got = accept(tree, tree_logits(tree, PROMPT), picker, lambda: torch.tensor(PROMPT))
    assert len(got.tokens) >= 2
    assert seen == [PROMPT + list(got.tokens[:k]) for k in range(len(got.tokens))]


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"temperature": 1.0, "top_p": 1.5, "top_k": -2}, {"temperature": 1.0, "min_p": 2.0}]
)
def test_values_out_of_range_are_refused_at_once(bad):
    with pytest.raises(ValueError):
        Sampling(**bad)
