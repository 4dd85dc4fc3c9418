"""Acceptance: the walk through a verified tree, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from longdraft import Sampling
from longdraft.engine.accept import AcceptedPath, accept_path, sample_target_tokens
from longdraft.engine.sampler import SampleNoise, Sampler
from longdraft.errors import NumericalError
from longdraft.trees.tree import TokenTree, chain_tree, tree_from_paths

VOCABULARY = 5
PREFIX = [1, 4, 4]


def target(text: list[int]) -> torch.Tensor:
    """Raw logits after a context: random, but reproducible; they depend on the last three tokens."""
    seed = sum((token + 1) * 7**i for i, token in enumerate(text[-3:]))
    return 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


def verified(tree: TokenTree, prefix: list[int]) -> torch.Tensor:
    """The target's logits on a tree whose root is the prefix's last token."""
    rows = [target(prefix[:-1] + [tree.tokens[i] for i in tree.path(node)]) for node in range(tree.size)]
    return torch.stack(rows)


def sampler(sampling: Sampling | None = None, seed: int = 0) -> Sampler:
    sampling = sampling or Sampling()
    return Sampler(sampling.greedy, sampling.processors(), SampleNoise(torch.Generator().manual_seed(seed)))


def decode(tree_for, sampler: Sampler, n: int) -> list[int]:
    """Plain rounds of propose, verify, accept, until n tokens are out."""
    text = list(PREFIX)
    while len(text) - len(PREFIX) < n:
        tree = tree_for(text)
        left = n - (len(text) - len(PREFIX))
        emitted: list[int] = []

        def full(token: int, emitted=emitted, left=left) -> bool:
            emitted.append(token)
            return len(emitted) == left

        text += accept_path(tree, verified(tree, text), sampler, lambda text=text: torch.tensor(text), full).token_ids
    return text[len(PREFIX) :]


def autoregressive(text: list[int]) -> TokenTree:
    return TokenTree((text[-1],), (-1,))


@st.composite
def trees(draw) -> TokenTree:
    """Random trees under the prefix's last token; siblings may be equal."""
    size = draw(st.integers(1, 20))
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=size - 1, max_size=size - 1))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
    return TokenTree((PREFIX[-1], *tokens), tuple(parents))


def walk(tree: TokenTree, following: list[int]) -> AcceptedPath:
    """The definition: from the root down to the child with the next token, as far as there is one."""
    path = [0]
    for count, token in enumerate(following, start=1):
        children = [i for i in range(tree.size) if tree.parents[i] == path[-1] and tree.tokens[i] == token]
        if not children:
            return AcceptedPath(tuple(path), tuple(following[:count]))
        path.append(children[0])
    raise AssertionError("the tree is deeper than the text")


# --- greedy ---


@pytest.mark.parametrize("penalty", [None, 1.8], ids=["plain", "repetition penalty"])
def test_a_greedy_walk_accepts_the_greedy_tokens_that_are_in_the_tree(penalty):
    sampling = Sampling(repetition_penalty=penalty)
    following = decode(autoregressive, sampler(sampling), 21)

    @given(trees())
    def check(tree):
        got = accept_path(tree, verified(tree, PREFIX), sampler(sampling), lambda: torch.tensor(PREFIX))
        assert got == walk(tree, following)

    check()


def test_logits_of_padding_are_not_read():
    tree = chain_tree(PREFIX[-1], [])
    padded = torch.cat([verified(tree, PREFIX), torch.full((3, VOCABULARY), float("nan"))])
    assert accept_path(tree, padded, sampler(), lambda: torch.tensor(PREFIX)).nodes == (0,)


def test_maxima_of_a_batch_give_the_tokens_of_each_tree():
    """Trees of a batch are padded to the largest one. NaN in padding is nobody's, NaN in a node is an error."""
    trees = [chain_tree(PREFIX[-1], tokens) for tokens in ([2, 3], [], [1])]
    padded = torch.full((3, 3, VOCABULARY), float("nan"))
    for b, tree in enumerate(trees):
        padded[b, : tree.size] = verified(tree, PREFIX)
    row_max, argmax = padded.max(-1)
    samplers = [sampler(), sampler(Sampling(temperature=1.0)), sampler()]
    nodes, maxima = list(zip(trees, padded, samplers, strict=True)), list(zip(row_max, argmax, strict=True))
    found = sample_target_tokens(nodes, maxima=maxima)
    assert found == sample_target_tokens(nodes)
    assert found == [
        verified(trees[0], PREFIX).argmax(-1).tolist(),
        None,
        verified(trees[2], PREFIX).argmax(-1).tolist(),
    ]
    row_max[2, 1] = float("nan")
    with pytest.raises(NumericalError):
        sample_target_tokens(nodes, maxima=maxima)


# --- stopping, and who is called how often ---


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_should_stop_ends_the_walk(stop_after):
    following = decode(autoregressive, sampler(), 4)
    tree = chain_tree(PREFIX[-1], following)
    told: list[int] = []

    def stop(token: int) -> bool:
        told.append(token)
        return len(told) == stop_after

    got = accept_path(tree, verified(tree, PREFIX), sampler(), lambda: torch.tensor(PREFIX), stop)
    assert told == following[:stop_after] == list(got.token_ids)
    assert got.nodes == tuple(range(stop_after))


class Recorder:
    """A stateful processor that records every context that it sees."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert text.shape[0] == scores.shape[0] == 1
        self.texts.append(text[0].tolist())
        return scores


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_a_stateful_processor_sees_one_call_a_token_in_order_whatever_is_drafted(greedy):
    recorder = Recorder()
    who = Sampler(greedy, LogitsProcessorList([recorder]), SampleNoise(torch.Generator().manual_seed(3)))
    bushy = [[a, b, a] for a in range(VOCABULARY) for b in range(VOCABULARY)]
    out = decode(lambda text: tree_from_paths(text[-1], bushy), who, 12)
    assert recorder.texts == [PREFIX + out[:i] for i in range(12)]


def test_a_processor_that_writes_in_place_does_not_spoil_the_logits():
    def ban(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(0.0)

    logits = verified(autoregressive(PREFIX), PREFIX)
    before = logits.clone()
    Sampler(True, LogitsProcessorList([ban])).sample(torch.tensor(PREFIX), logits[0])
    assert torch.equal(logits, before)
