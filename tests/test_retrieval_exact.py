"""LongSpec and EAGLE-3 with retrieval, end to end: the output is the target's, and nothing outlives a request."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from longdraft import PromptCache, Sampling, Speculator
from longdraft.drafters.eagle3 import Eagle3Drafter
from longdraft.drafters.longspec import LongSpecDrafter
from longdraft.engine import Engine
from longdraft.sequence import Sequence
from longdraft.target.runner import TargetRunner
from longdraft.verify.sampling import Picker
from tests.drafts import random_draft, random_eagle3
from tests.tiny import FAMILIES, tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [i * i % 11 for i in range(70)], [8]]
# A working cache that is soon smaller than the text.
SMALL = {"chunk": 2, "chunks": 3, "every": 2, "sink": 2, "recent": 4}
TREE = {"widths": (3, 3, 2)}
METHODS = ("longspec", "specextend-eagle3")


def six_layers(family="llama", **over):
    return tiny_model(family, layers=6, **{"vocab": 11, **over})


def folder(method, where, model, **over):
    kind = random_draft if method == "longspec" else random_eagle3
    return kind(where, model, **over)


def speculator(method, where, model, **options):
    given = {"draft": folder(method, where, model), **options}
    return Speculator(method, target=model, **({"retrieval": True} if method == "longspec" else {}) | given)


def tokens(results):
    return [r.token_ids for r in results]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [TREE, {"adaptive": True, "every": 5, "tree": "opt", "depth": 3}], ids=str)
def test_greedy_gives_the_tokens_of_plain_decoding(tmp_path, method, family, options):
    model = six_layers(family)
    spec = speculator(method, tmp_path, model, **SMALL | options)
    expected = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
    results = spec.generate(PROMPTS, max_new_tokens=24)
    assert tokens(results) == tokens(expected) and sum(r.accepted for r in results) > 0
    assert results[0].exact and results[0].method == method


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)], ids=str)
def test_a_ragged_batch_equals_its_prompts_one_by_one(tmp_path, method, sampling):
    """In rounds and accepted tokens too: slots share nothing."""
    model = six_layers(dtype=torch.float64)
    spec = speculator(method, tmp_path, model, **SMALL, **TREE)
    together = spec.generate(PROMPTS, max_new_tokens=30, sampling=sampling, seed=5)
    for i, prompt in enumerate(PROMPTS):
        alone = spec.generate([prompt], max_new_tokens=30, sampling=sampling, seed=5 + i)[0]
        plain = Speculator("ar", target=model).generate([prompt], max_new_tokens=30, sampling=sampling, seed=5 + i)[0]
        assert together[i].token_ids == alone.token_ids == plain.token_ids
        assert (together[i].rounds, together[i].accepted) == (alone.rounds, alone.accepted)


@pytest.mark.parametrize("method", METHODS)
def test_sampled_runs_have_the_targets_distribution(tmp_path, method):
    """Chi-square of the joint distribution of three tokens, over a vocabulary of four."""
    size, draws, batch = 4, 1000, 250
    model = tiny_model(vocab=size, layers=1)
    over = {"layers": (0,), "feature_size": 48} if method != "longspec" else {}
    options = {"draft": folder(method, tmp_path, model, **over), "widths": (2, 2), **SMALL, "retrieval": True}
    spec = Speculator(method, target=model, **options)
    sampling, prompt = Sampling(2.0, top_k=3), [1, 2, 3, 1, 2, 0, 1] * 3
    counts = torch.zeros(size, size, size, dtype=torch.double)
    accepted = 0
    for start in range(0, draws, batch):
        for r in spec.generate([prompt] * batch, max_new_tokens=3, sampling=sampling, seed=start):
            counts[tuple(r.token_ids)] += 1
            accepted += r.accepted
    expected = torch.ones(1, dtype=torch.double) * draws
    texts = torch.tensor([prompt])
    for _ in range(3):
        with torch.no_grad():
            logits = sampling.processors()(texts, model(texts).logits[:, -1])
        expected = (expected[:, None] * torch.softmax(logits, -1).double()).flatten()
        following = torch.arange(size).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(size, dim=0), following], dim=1)
    counts = counts.flatten()
    assert accepted > 300, "the draft must have been taken for the test to mean something"
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = wanted > 0
    assert chisquare(observed[keep], wanted[keep] * draws / wanted[keep].sum()).pvalue > 0.01


# --- the proposals ---


def drafter(method, where, model, **options):
    kind = LongSpecDrafter if method == "longspec" else Eagle3Drafter
    return kind.load(folder(method, where, model), **TREE, **options)


def proposals(drafter, model, prompts, n=24, sampling=None):
    """Every tree that is proposed in a run."""
    found, propose = [], type(drafter).propose

    def recorded(sequences, budget=None):
        trees = propose(drafter, sequences, budget)
        found.extend((s.index, len(s.output), tree) for s, tree in zip(sequences, trees, strict=True))
        return trees

    drafter.propose = recorded
    sampling = sampling or Sampling()
    sequences = [Sequence(i, list(p), n, greedy=sampling.greedy) for i, p in enumerate(prompts)]
    generators = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    pickers = [Picker(sampling.greedy, sampling.processors(), g) for g in generators]
    engine = Engine(TargetRunner(model), drafter, sequences, pickers)
    list(engine.steps(engine.open()))
    return found


def shapes(found):
    return [(i, n, tree.tokens, tree.parents) for i, n, tree in found]


def close(a, b):
    return all(x.log_probs == pytest.approx(y.log_probs, abs=1e-9) for (*_, x), (*_, y) in zip(a, b, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_a_working_cache_that_covers_the_text_proposes_what_the_draft_does_without(tmp_path, method, sampling):
    model = six_layers(dtype=torch.float64)
    plain = proposals(drafter(method, tmp_path, model), model, PROMPTS, 30, sampling)
    sizes = {"chunk": 2, "chunks": 60, "every": 2, "sink": 2, "recent": 4}
    covering = proposals(drafter(method, tmp_path, model, retrieval=True, **sizes), model, PROMPTS, 30, sampling)
    assert shapes(plain) == shapes(covering) and close(plain, covering)
    # And one that does not cover it says something else, or all of this would mean nothing.
    other = proposals(drafter(method, tmp_path, model, retrieval=True, **SMALL), model, PROMPTS, 30, sampling)
    assert shapes(plain) != shapes(other)


@pytest.mark.parametrize("method", METHODS)
def test_two_requests_with_one_drafter_equal_two_fresh_ones(tmp_path, method):
    """What was retrieved, counted or gathered for the first must not meet the second."""
    model = six_layers(dtype=torch.float64)
    options = {"retrieval": True, **SMALL, "every": 7}
    first, second = PROMPTS[2], [(5 * i * i + 2 * i) % 11 for i in range(66)]
    used = drafter(method, tmp_path, model, **options)
    for prompt in (first, second, first):
        fresh = drafter(method, tmp_path, model, **options)
        again, anew = proposals(used, model, [prompt]), proposals(fresh, model, [prompt])
        assert shapes(again) == shapes(anew) and close(again, anew)


@pytest.mark.parametrize("method", METHODS)
def test_a_kept_cache_is_taken_up_again(tmp_path, method):
    model = six_layers(dtype=torch.float64)
    spec, ar = speculator(method, tmp_path, model, **SMALL, **TREE), Speculator("ar", target=model)
    cache = PromptCache()
    for prompt in (PROMPTS[2], PROMPTS[2][:50], [*PROMPTS[2], 3, 4], PROMPTS[0]):
        kept = spec.generate([prompt], max_new_tokens=20, cache=cache)[0]
        assert kept.token_ids == ar.generate([prompt], max_new_tokens=20)[0].token_ids
        assert kept.accepted == spec.generate([prompt], max_new_tokens=20)[0].accepted


@pytest.mark.parametrize("method", METHODS)
def test_an_offloaded_cache_is_scored_and_gathered_from_too(tmp_path, method):
    model = six_layers(dtype=torch.float64)
    here = speculator(method, tmp_path / "draft", model, **SMALL, **TREE).generate(PROMPTS, max_new_tokens=20)
    there = speculator(method, tmp_path / "draft", model, offload="disk", **SMALL, **TREE)
    found = there.generate(PROMPTS, max_new_tokens=20)
    assert [(r.token_ids, r.accepted) for r in found] == [(r.token_ids, r.accepted) for r in here]


# --- what the target is asked ---


def test_nothing_is_tapped_where_nobody_asks(tmp_path, monkeypatch):
    model = six_layers()
    asked, forward = [], TargetRunner.forward

    def seen(self, *args, **options):
        asked.append(options.get("taps"))
        return forward(self, *args, **options)

    monkeypatch.setattr(TargetRunner, "forward", seen)
    Speculator("longspec", target=model, draft=random_draft(tmp_path, model), **TREE).generate(
        [PROMPTS[2]], max_new_tokens=9
    )
    assert asked and not any(taps.queries for taps in asked if taps is not None)


# --- SpecPV ---


@pytest.mark.parametrize("kind", ["longspec", "eagle3"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.95)], ids=str)
def test_the_exact_tier_of_specpv_writes_what_plain_decoding_writes(tmp_path, kind, sampling):
    model = six_layers(dtype=torch.float64)
    sizes = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6, "chunk": 2, "chunks": 4, "every": 2}
    spec = Speculator(
        "specpv-exact", target=model, draft=folder(kind, tmp_path, model), drafter=kind, retrieval=True, **TREE, **sizes
    )
    want = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=40, sampling=sampling, seed=2)
    got = spec.generate(PROMPTS, max_new_tokens=40, sampling=sampling, seed=2)
    assert tokens(got) == tokens(want)
    assert got[0].partial_rounds > 0 and sum(r.rolled_back for r in got) > 0 and sum(r.accepted for r in got) > 0


@pytest.mark.parametrize("kind", ["longspec", "eagle3"])
def test_specpv_drafts_with_retrieval(tmp_path, kind):
    """With a budget that covers the text, it is exact too."""
    model = six_layers(dtype=torch.float64)
    options = {"draft": folder(kind, tmp_path, model), "drafter": kind, "retrieval": True, **TREE}
    sizes = {"sink": 4, "recent": 4, "block": 4, "margin": 6, "chunk": 2, "chunks": 4, "every": 2}
    want = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=40)
    whole = Speculator("specpv", target=model, budget=200, **options, **sizes)
    assert tokens(whole.generate(PROMPTS, max_new_tokens=40)) == tokens(want)
    part = Speculator("specpv", target=model, budget=8, **options, **sizes)
    results = part.generate(PROMPTS, max_new_tokens=40)
    assert all(len(r.token_ids) == 40 for r in results) and results[0].partial_rounds > 0


# --- options ---


def test_sizes_of_specpvs_partial_cache_are_none_of_a_draft_without_retrieval(tmp_path):
    model = six_layers()
    options = {"draft": random_draft(tmp_path, model), "drafter": "longspec", "sink": 4, "recent": 4, "block": 4}
    Speculator("specpv", target=model, budget=8, **options)
    with pytest.raises(ValueError, match="chunks shape the retrieval"):
        Speculator("specpv", target=model, budget=8, chunks=8, **options)


def test_the_method_retrieves_and_grows_an_opt_tree(tmp_path):
    model = six_layers()
    draft = random_eagle3(tmp_path, model)
    spec = Speculator("specextend-eagle3", target=model, draft=draft)
    made = spec._recipe(spec.runner()).drafter()
    assert made.retrieval.chunks == 64 and made.retrieval.every == 8 and made.plan.threshold is not None
    spec = Speculator("specextend-eagle3", target=model, draft=draft, widths=(2, 2), chunks=16)
    assert spec._recipe(spec.runner()).drafter().plan.widths == (2, 2)
    with pytest.raises(ValueError, match="window and retrieval"):
        Speculator("specextend-eagle3", target=model, draft=draft, window=64)
