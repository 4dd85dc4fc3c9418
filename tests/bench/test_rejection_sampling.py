"""Rejection sampling: acceptance follows the formula, and the output has the target's distribution."""

from __future__ import annotations

import itertools

import pytest
import torch

from longdraft import Sampling, Speculator
from longdraft.bench.contenders import Job
from longdraft.bench.rejection_sampling import RejectionSampler, RejectionSamplingJob, acceptance_probs
from longdraft.engine.accept import accept_path
from longdraft.trees.tree import TokenTree, tree_from_paths
from tests.support.drafts import small_lm
from tests.support.tiny import tiny_model

SIZE, NEW = 5, 40


def distribution(seed: int, sharpness: float = 1.5) -> torch.Tensor:
    logits = sharpness * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    return logits.softmax(-1)


def orders(q: torch.Tensor, count: int):
    """All ordered draws of ``count`` tokens without replacement, with their probabilities."""
    for tokens in itertools.permutations(range(SIZE), count):
        chance, left = 1.0, 1.0
        for token in tokens:
            chance *= float(q[token]) / left
            left -= float(q[token])
        yield list(tokens), chance


@pytest.mark.parametrize("count", [1, 2, 3, SIZE - 1])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
def test_what_is_emitted_has_the_targets_distribution(count, drawn):
    """Computed over all possible draws. For one drawn token the acceptance is the sum of min(p, q)."""
    for seed in range(4):
        p, q = distribution(seed), distribution(seed + 100)
        emitted, accepted = torch.zeros(SIZE, dtype=torch.double), 0.0
        for tokens, chance in orders(q, count) if drawn else [(list(range(count)), 1.0)]:
            chances, rest = acceptance_probs(p, tokens, q if drawn else None)
            left = 1.0
            for token, own in zip(tokens, chances, strict=True):
                emitted[token] += chance * left * own
                accepted += chance * left * own
                left *= 1 - own
            emitted += chance * left * rest
        torch.testing.assert_close(emitted, p, atol=1e-12, rtol=0)
        if not drawn:
            assert accepted == pytest.approx(float(p[:count].sum()))
        elif count == 1:
            assert accepted == pytest.approx(float(torch.minimum(p, q).sum()))
        else:  # more candidates are accepted more often
            assert float(torch.minimum(p, q).sum()) < accepted <= 1 + 1e-12


def test_a_walk_has_the_targets_distribution():
    """Two tokens after a root, 4,000 times; each time the tree's candidates are drawn again."""
    table, g = torch.stack([distribution(i) for i in range(SIZE)]), torch.Generator().manual_seed(1)
    drafts = torch.stack([distribution(i + 50) for i in range(SIZE)])
    sampler, root, times = RejectionSampler(Sampling(1.0), g), 2, 4_000
    counts, right = torch.zeros(SIZE, SIZE), 0
    for _ in range(times):
        first = drafts[root].multinomial(2, generator=g).tolist()
        second = {token: drafts[token].multinomial(2, generator=g).tolist() for token in first}
        sampler.candidates_by_path = {(): (first, drafts[root])} | {(t,): (second[t], drafts[t]) for t in first}
        tree = tree_from_paths(root, [(a, b) for a in first for b in second[a]])
        sampler.start_round(tree)
        logits = table[list(tree.tokens)].log()
        tokens = list(accept_path(tree, logits, sampler, lambda: torch.tensor([root])).token_ids[:2])
        right += len(tokens) == 2
        sampler.start_round(TokenTree((0,), (-1,)))
        if len(tokens) == 1:
            tokens.append(sampler.sample(torch.tensor([]), table[tokens[0]].log()))
        counts[tokens[0], tokens[1]] += 1
    expected = times * table[root][:, None] * table
    assert 0.3 * times < right < 0.99 * times
    assert float(((counts - expected) ** 2 / expected).sum()) < 60  # chi-square of 24 degrees: 51 is one in a thousand


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, a draft that is the same model, and another draft."""
    target = tiny_model(vocab=61)
    folder = tmp_path_factory.mktemp("lm")
    small_lm(folder / "other", vocab=61)
    target.save_pretrained(folder / "same")
    return target, folder


def decoded(models, draft: str, job: type[Job] = RejectionSamplingJob, seeds: int = 1, **options):
    target, folder = models
    spec = Speculator("small-lm", target=target, draft=folder / draft, plan="fixed", view="full", **options)
    sampling = Sampling(1.0, foresee=False)
    runs = []
    for seed in range(seeds):
        run = job(((3, 1, 4, 1, 5, 9, 2, 6),), NEW, sampling, seed, frozenset()).start(spec, None)
        steps = [step for step in run if step.tree is not None]
        runs.append((*run.results(), steps))
    return runs


def test_a_chain_of_the_target_itself_is_accepted_whole(models):
    """Without rejection sampling a draft without the target's noise is not always accepted."""
    for result, steps in decoded(models, "same", tree="chain", depth=3):
        assert result.accepted / result.drafted > 0.98 and len({step.tree.tokens for step in steps}) > 5
    chosen = decoded(models, "same", Job, tree="chain", depth=3)
    assert all(result.accepted < result.drafted / 2 for result, _ in chosen)


@pytest.mark.parametrize(
    "options",
    [{"tree": "chain", "depth": 3}, {"tree": "static", "widths": (3, 2)},
     {"tree": "static", "widths": (3, 2), "nodes": 5}, {"tree": "dynamic", "depth": 3, "top_k": 3, "nodes": 8},
     {"tree": "chain", "depth": 3, "lookup": True}],
    ids=str,
)  # fmt: skip
def test_every_kind_of_tree_is_accepted_in_part(models, options):
    draft = "same" if options["tree"] == "dynamic" else "other"  # a likely token is chosen there, and it alone
    for result, steps in decoded(models, draft, **options):
        assert 0 < result.accepted < result.drafted and result.new_tokens == NEW
        assert all(step.tree.num_draft_tokens for step in steps[:-1])


def test_the_seed_says_the_text(models):
    first, again = (decoded(models, "other", seeds=2, tree="static", widths=(3, 2)) for _ in range(2))
    assert [r.token_ids for r, _ in first] == [r.token_ids for r, _ in again]
    assert first[0][0].token_ids != first[1][0].token_ids
