"""Residual acceptance has the target's distribution, for chains and for trees sampled without replacement."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from longdraft.engine import residual
from longdraft.engine.accept import Accepted, accept
from longdraft.engine.draws import OwnDraws
from longdraft.engine.sampler import Sampler, Sampling
from longdraft.trees.builders import merged, union
from longdraft.trees.draft_sampler import DraftSampler
from longdraft.trees.sampled import SampledStatic
from longdraft.trees.tree import SampledChildren, TokenTree
from tests import chi_square
from tests.engine.table_target import PROMPT, SETTINGS, VOCABULARY, Memory, logits_after, text_law, tree_logits

DRAWS, BATCH = 3_000, 250
# The draft: another table, that knows the last token alone and never says the token 6.
DRAFT = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(9)) * 1.3
DRAFT[:, 6] = float("-inf")
SHAPES = [(1, 1, 1), (3,), (2, 2), (8,)]


def expand(level):
    return DRAFT[level.tokens]


class Remembering(DraftSampler):
    """Computes each distribution once."""

    def distribution(self, path, logits, ids):
        known = self.__dict__.setdefault("known", {})
        key = (*path, -1, *logits.tolist())
        if key not in known:
            known[key] = super().distribution(path, logits, ids)
        return known[key]


def draft(sampling, seed) -> DraftSampler:
    processors = sampling.processors()
    generator = torch.Generator().manual_seed(seed)
    return Remembering(processors if len(processors) else None, generator, lambda: torch.tensor(PROMPT), VOCABULARY)


def p_value(sampling, trees, walk=accept, seed=1) -> float:
    """Chi-square of the first two tokens; plain decoding goes on where a walk ends after one."""
    sampler = Sampler(False, Memory(sampling.processors()), OwnDraws(torch.Generator().manual_seed(seed)))
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    for tree in itertools.islice(trees, DRAWS):
        said = []

        def two(token, said=said):
            said.append(token)
            return len(said) == 2

        emitted = list(walk(tree, tree_logits(tree), sampler, lambda: torch.tensor(PROMPT), two).tokens)
        if len(emitted) == 1:
            text = [*PROMPT, *emitted]
            emitted.append(sampler.sample(torch.tensor(text), logits_after(text)))
        counts[tuple(emitted)] += 1
    return chi_square.p_value(counts, text_law(sampling, 2), cells=9)


def grown(widths, sampling, seed=3, change=lambda tree: tree):
    """Trees without end, each sampled anew; a few hundred at a time share the draft's forward."""
    sampler, kind = draft(sampling, seed), SampledStatic(widths=widths)
    while True:
        yield from map(change, kind.grow([PROMPT[-1]] * BATCH, expand, samplers=[sampler] * BATCH))


CASES = [(widths, "plain") for widths in SHAPES]
CASES += [((2, 1), s) for s in ("temperature", "top-p", "repetition penalty")] + [((1, 1), "all"), ((2, 2), "all")]


@pytest.mark.parametrize(("widths", "setting"), CASES, ids=str)
def test_sampled_trees_keep_the_targets_distribution(widths, setting):
    # Each case has seeds of its own: with the same ones a case in part repeats another.
    seed = 10 + CASES.index((widths, setting))
    assert p_value(SETTINGS[setting], grown(widths, SETTINGS[setting], 2 * seed), seed=seed) > 0.01


def test_a_draft_that_is_processed_otherwise_keeps_it_too():
    """The true distribution is all that is asked for: here the target is cut to three tokens, and the draft is not."""
    assert p_value(SETTINGS["top-k"], grown((2, 1), SETTINGS["plain"])) > 0.01


def test_joined_by_another_drafters_tree():
    found = union(PROMPT[-1], [[2, 6, 1], [6, 4], [0]])
    for order in (lambda t: merged(found, t), lambda t: merged(t, found)):
        trees = grown((2, 1), SETTINGS["plain"], change=order)
        assert next(trees).sampled and p_value(SETTINGS["plain"], trees) > 0.01


def test_cut_at_a_depth():
    trees = grown((2, 2), SETTINGS["plain"], change=lambda t: t.limited(1))
    assert list(next(trees).sampled) == [0] and p_value(SETTINGS["plain"], trees) > 0.01


# --- the test has teeth ---


def wrong_distribution(tree):
    """As if the draft had been uniform."""
    flat = torch.full((VOCABULARY,), 1 / VOCABULARY)
    sampled = {n: SampledChildren(flat, d.tokens) for n, d in tree.sampled.items()}
    return TokenTree(tree.tokens, tree.parents, sampled=sampled)


def likeliest_first(tree):
    """Children are sorted after they were sampled."""
    ordered = {n: sorted(d.tokens, key=lambda t, q=d.q: -q[t]) for n, d in tree.sampled.items()}
    sampled = {n: SampledChildren(tree.sampled[n].q, tuple(tokens)) for n, tokens in ordered.items()}
    return TokenTree(tree.tokens, tree.parents, sampled=sampled)


def the_sure_ones_alone(tree):
    """What is unlikely is left out, and the rest believed as if nothing had been."""
    return tree if tree.log_probs[1] > -1.5 else TokenTree(tree.tokens[:1], (-1,))


def forgets_the_residual(tree, logits, sampler, text, stop):
    """Samples from p after a refusal."""
    q, token = tree.sampled[0].q, tree.tokens[1]
    p = sampler.distribution(text(), logits[0])
    if torch.rand((), generator=sampler.draws.generator) * q[token] < p[token]:
        return Accepted((0,), (token,))
    return Accepted((0,), (sampler.sample(text(), logits[0]),))


@pytest.mark.parametrize("change", [wrong_distribution, likeliest_first, the_sure_ones_alone])
def test_a_wrong_distribution_is_noticed(change):
    assert p_value(SETTINGS["plain"], grown((2, 1), SETTINGS["plain"], change=change)) < 1e-6


def test_a_wrong_acceptance_is_noticed():
    assert p_value(SETTINGS["plain"], grown((1,), SETTINGS["plain"]), forgets_the_residual) < 1e-6


# --- exactly, on small vocabularies ---


def without_replacement(q: list[float], count: int):
    """(ordered tokens, probability) of every way to draw ``count`` of them."""
    for tokens in itertools.permutations([i for i, x in enumerate(q) if x > 0], count):
        left, chance = 1.0, 1.0
        for token in tokens:
            chance *= q[token] / left
            left -= q[token]
        yield tokens, chance


def output_law(p: torch.Tensor, q: torch.Tensor, tokens) -> torch.Tensor:
    """What comes out where these were drafted: the probabilities of each way that the samples can go, added up."""
    out, going = torch.zeros(len(p), dtype=torch.double), 1.0
    p, q = p.clone(), q.clone()
    for token in tokens:
        kept = min(1.0, float(p[token] / q[token]))
        out[token] += going * kept
        going *= 1 - kept
        left = (p - q).clamp_min(0)
        if not left.sum() > 1e-12:
            return out + going * p
        p = left / left.sum()
        q[token] = 0
        q = q / q.sum() if q.sum() > 0 else q
    return out + going * p


weights = st.lists(st.integers(0, 5), min_size=2, max_size=5)


@given(weights, weights, st.integers(1, 3))
def test_the_definition_is_exact(p, q, count):
    """Averaged over every draft, the output is p: what the acceptance is built on."""
    size = min(len(p), len(q))
    p, q = torch.tensor(p[:size]).double() + 1e-3, torch.tensor(q[:size]).double()
    if q.sum() == 0:
        return
    p, q = p / p.sum(), q / q.sum()
    count = min(count, int((q > 0).sum()))
    total = sum(chance * output_law(p, q, tokens) for tokens, chance in without_replacement(q.tolist(), count))
    torch.testing.assert_close(total, p, atol=1e-9, rtol=1e-6)


@given(weights, weights, st.integers(1, 3), st.integers(0, 2**20))
def test_the_code_is_the_definition(p, q, count, seed):
    """For a drafted list of tokens, how often each comes out."""
    size = min(len(p), len(q))
    p, q = torch.tensor(p[:size]).double() + 0.1, torch.tensor(q[:size]).double() + 0.1
    p, q = p / p.sum(), (q / q.sum()).float()
    g = torch.Generator().manual_seed(seed)
    tokens = tuple(torch.randperm(size, generator=g)[:count].tolist())
    found = torch.zeros(size)
    for _ in range(300):
        found[residual.sample(p, SampledChildren(q, tokens), g)] += 1
    expected = output_law(p, q.double(), tokens)
    # Five standard deviations: one of a few hundred examples in a million runs.
    assert ((found / 300 - expected).abs() <= 5 * (expected * (1 - expected) / 300).sqrt() + 5e-3).all()


def test_edges():
    g = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.5, 0.0, 0.0])
    same = SampledChildren(p, (1,))
    assert {residual.sample(p, same, g) for _ in range(50)} == {1}  # the same distribution: always kept
    apart = SampledChildren(torch.tensor([0.0, 0.0, 0.5, 0.5]), (3, 2))
    assert {residual.sample(p, apart, g) for _ in range(50)} == {0, 1}  # never kept
    assert residual.sample(torch.tensor([1.0, 0.0]), SampledChildren(torch.tensor([0.0, 1.0]), ()), g) == 0
    assert p.tolist() == [0.5, 0.5, 0.0, 0.0] and same.q.tolist() == p.tolist()  # nothing is changed


# --- sampling ---


def test_samples_without_replacement_have_their_distribution():
    sampler = draft(Sampling(1.0), 0)
    q = torch.tensor([0.5, 0.3, 0.2, 0.0])
    counts = {}
    for _ in range(6000):
        tokens, possible = sampler.sample(q, 3)
        assert possible == 3 and 3 not in tokens
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    expected = dict(without_replacement(q.tolist(), 3))
    assert counts.keys() == expected.keys()
    wanted = torch.tensor([expected[t] for t in expected], dtype=torch.double)
    assert chisquare([counts[t] for t in expected], 6000 * wanted / wanted.sum()).pvalue > 0.01


def test_a_smaller_vocabulary_and_a_draft_that_overflowed():
    sampler = draft(Sampling(1.0), 0)
    ids = torch.tensor([1, 4, 7])
    q = sampler.distribution([], torch.tensor([0.0, 1.0, 2.0]), ids)
    assert q.shape == (VOCABULARY,) and q[ids].sum() == pytest.approx(1.0)
    assert sampler.sample(q, 5)[1] == 3
    broken = sampler.distribution([], torch.full((VOCABULARY,), float("nan")), None)
    assert broken.tolist() == [1 / VOCABULARY] * VOCABULARY


def test_shapes_do_not_depend_on_what_is_sampled():
    samplers = [draft(Sampling(1.0), i) for i in range(3)]
    trees = SampledStatic(widths=(8, 2)).grow([5, 1, 2], expand, [2, 0, 1], samplers=samplers)
    assert [t.drafted for t in trees] == [24, 0, 8]
    for tree in trees:
        for node, found in tree.sampled.items():
            children = [tree.tokens[i] for i in range(tree.size) if tree.parents[i] == node]
            assert children[: len(found.tokens)] == list(found.tokens) and 6 not in found.tokens


def test_a_drafters_samples_follow_from_the_seed_and_leave_the_targets_alone():
    def sampler(seed):
        return Sampler(False, Sampling(1.0).processors(), OwnDraws(torch.Generator().manual_seed(seed)))

    q = torch.full((64,), 1 / 64)

    def said(owner, number=0):
        sampler = owner.draft_sampler(lambda: torch.tensor(PROMPT), 64, number)
        return [sampler.sample(q, 1)[0][0] for _ in range(20)]

    one = sampler(1)
    before = one.draws.generator.get_state()
    assert said(one) == said(sampler(1)) != said(sampler(2))
    assert said(one, 1) != said(one)
    assert torch.equal(before, one.draws.generator.get_state())
    own = [sampler(1).sample(torch.tensor(PROMPT), q.log()) for _ in range(1)]
    assert own[0] != said(one)[0]
