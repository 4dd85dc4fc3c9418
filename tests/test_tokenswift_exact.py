"""Chained heads and token reuse, end to end: whatever is drafted, the output is the target's."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from longdraft import PromptCache, Sampling, Speculator
from longdraft.planning import choice
from longdraft.planning.costs import CostTable
from tests.drafts import random_draft, random_heads, small_lm
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
# A view that the longer prompts do not fit.
VIEW = {"budget": 24, "sink": 4, "window": 8}
KINDS = [
    ("heads", {}),
    ("heads", {"tree": "opt", "nodes": 6}),
    ("tokenswift", {"reuse_n": 2, "view": "none"}),
    ("tokenswift", {"reuse_n": 2, **VIEW}),
]
kinds = pytest.mark.parametrize(("method", "options"), KINDS, ids=str)


def pair(method, model, folder, **options):
    """The method, and plain decoding of the same target."""
    spec = Speculator(method, target=model, draft=random_heads(folder, model), **options)
    return spec, Speculator("ar", target=model)


@pytest.mark.parametrize("family", FAMILIES)
@kinds
def test_greedy_gives_the_tokens_of_plain_decoding(tmp_path, family, method, options):
    spec, ar = pair(method, tiny_model(family, vocab=11), tmp_path, **options)
    accepted = 0
    for prompt in PROMPTS:
        result = spec.generate([prompt], max_new_tokens=40)[0]
        assert result.token_ids == ar.generate([prompt], max_new_tokens=40)[0].token_ids
        assert (result.method, result.exact) == (method, True)
        accepted += result.accepted
    assert accepted > 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2),
        Sampling(1.0, min_p=0.1, repetition_penalty=1.2, repetition_window=7),
        Sampling(repetition_penalty=1.4, repetition_window=5),
    ],
    ids=str,
)
@kinds
def test_a_ragged_batch_equals_its_prompts_one_by_one(tmp_path, sampling, method, options):
    spec, ar = pair(method, tiny_model(vocab=11, dtype=torch.float64), tmp_path, **options)
    together = spec.generate(PROMPTS, max_new_tokens=30, sampling=sampling, seed=5)
    for i, prompt in enumerate(PROMPTS):
        alone = spec.generate([prompt], max_new_tokens=30, sampling=sampling, seed=5 + i)[0]
        plain = ar.generate([prompt], max_new_tokens=30, sampling=sampling, seed=5 + i)[0]
        assert together[i].token_ids == alone.token_ids == plain.token_ids
        assert together[i].rounds == alone.rounds and together[i].accepted == alone.accepted


@kinds
def test_two_requests_equal_two_fresh_ones(tmp_path, method, options):
    model = tiny_model(vocab=11, dtype=torch.float64)
    spec, _ = pair(method, model, tmp_path, **options)
    for prompts in (PROMPTS[:2], PROMPTS[2:]):
        fresh = Speculator(method, target=model, draft=tmp_path, **options).generate(prompts, max_new_tokens=30)
        again = spec.generate(prompts, max_new_tokens=30)
        assert [(r.token_ids, r.accepted, r.rounds) for r in again] == [
            (r.token_ids, r.accepted, r.rounds) for r in fresh
        ]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_budgets_smaller_than_the_tree_is_deep(tmp_path, n):
    spec, ar = pair("tokenswift", tiny_model(vocab=11), tmp_path)
    results = spec.generate(PROMPTS, max_new_tokens=n)
    assert [r.token_ids for r in results] == [r.token_ids for r in ar.generate(PROMPTS, max_new_tokens=n)]


@kinds
def test_a_planner_decides_how_much(tmp_path, monkeypatch, method, options):
    table = CostTable((0,), (1, 64), ((1e-2, 1.01e-2),))
    monkeypatch.setattr(choice, "table_for", lambda runner, progress=None, seconds=None: table)
    model = tiny_model(vocab=11, dtype=torch.float64)
    spec, ar = pair(method, model, tmp_path, plan="auto", **options)
    results = spec.generate(PROMPTS, max_new_tokens=60)
    assert [r.token_ids for r in results] == [r.token_ids for r in ar.generate(PROMPTS, max_new_tokens=60)]
    assert sum(r.accepted for r in results) > 0


def test_it_ends_where_plain_decoding_ends(tmp_path):
    model = tiny_model(vocab=61)
    draft = random_heads(tmp_path, model)
    ar = Speculator("ar", target=model, tokenizer=tiny_tokenizer())
    spec = Speculator("tokenswift", target=model, tokenizer=tiny_tokenizer(), draft=draft)
    plain = ar.generate([[7, 8, 9]], max_new_tokens=30)[0]
    for eos in sorted(set(plain.token_ids))[:6]:
        got = spec.generate([[7, 8, 9], [1]], max_new_tokens=30, eos_token_ids=[eos])[0]
        assert got.token_ids == plain.token_ids[: plain.token_ids.index(eos) + 1] and got.finish_reason == "eos"


def test_a_kept_cache_is_taken_up_again(tmp_path):
    """One without states is read again."""
    spec, ar = pair("tokenswift", tiny_model(vocab=11, dtype=torch.float64), tmp_path)
    cache = PromptCache()
    first = ar.generate([PROMPTS[0]], max_new_tokens=20, cache=cache)[0]
    for prompt in ([*PROMPTS[0], *first.token_ids, 4], [8, 9], PROMPTS[0]):
        kept = spec.generate([prompt], max_new_tokens=20, cache=cache)[0]
        assert kept.token_ids == ar.generate([prompt], max_new_tokens=20)[0].token_ids


def test_a_closed_run_and_two_runs_at_once(tmp_path):
    spec, ar = pair("tokenswift", tiny_model(vocab=11, dtype=torch.float64), tmp_path)
    cut = spec.stream([PROMPTS[0]], max_new_tokens=30)
    next(iter(cut)), next(iter(cut))
    cut.close()
    one, two = (spec.stream([p], max_new_tokens=30) for p in PROMPTS[1:3])
    for _ in range(4):
        next(iter(one), None), next(iter(two), None)
    expected = [ar.generate([p], max_new_tokens=30)[0].token_ids for p in PROMPTS[1:3]]
    assert [r.results()[0].token_ids for r in (one, two)] == expected


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}], ids=str)
def test_custom_generate(tmp_path, settings):
    model = tiny_model(vocab=11, dtype=torch.float64)
    spec = Speculator.from_pretrained(random_heads(tmp_path, model))
    assert spec.method.name == "heads"
    ids = torch.tensor([PROMPTS[0]])
    outputs = []
    for extra in ({}, {"custom_generate": spec}):
        torch.manual_seed(0)
        outputs.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, **settings, **extra))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("kept", [None, [0, 2, 3, 5, 7, 10]])
def test_smaller_vocabularies_and_lookup(tmp_path, kept, lookup):
    model = tiny_model(vocab=11, dtype=torch.float64)
    spec = Speculator("tokenswift", target=model, draft=random_heads(tmp_path, model, kept=kept), lookup=lookup)
    results = spec.generate(PROMPTS, max_new_tokens=40)
    want = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=40)
    assert [r.token_ids for r in results] == [r.token_ids for r in want]


def test_heads_that_overflow_only_cost_time(tmp_path):
    model = tiny_model(vocab=11)
    spec, ar = pair("tokenswift", model, tmp_path)
    block = spec.options["draft"].bound(spec.runner()).block
    with torch.no_grad():
        block.heads[1].proj.weight.fill_(float("nan"))
    expected = ar.generate(PROMPTS, max_new_tokens=12)
    assert [r.token_ids for r in spec.generate(PROMPTS, max_new_tokens=12)] == [r.token_ids for r in expected]


@pytest.mark.parametrize("method", ["specpv", "specpv-exact"])
def test_specpv_takes_them_for_a_drafter(tmp_path, method):
    model = tiny_model(vocab=11, dtype=torch.float64)
    sizes = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6}
    spec = Speculator(method, target=model, draft=random_heads(tmp_path, model), **sizes)
    results = spec.generate(PROMPTS, max_new_tokens=30)
    assert all(len(r.token_ids) == 30 for r in results) and sum(r.accepted for r in results) > 0
    if method == "specpv-exact":
        want = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=30)
        assert [r.token_ids for r in results] == [r.token_ids for r in want]


# --- drawn text: the same distribution ---

RESIDUAL = [
    ("heads", {"acceptance": "residual"}),
    ("tokenswift", {"acceptance": "residual", "widths": (2, 2), "reuse_n": 2, "view": "none"}),
    ("tokenswift", {"acceptance": "residual", "widths": (1, 2), "budget": 4, "sink": 1, "window": 1}),
    ("small-lm", {"acceptance": "residual", "depth": 3}),
    ("small-lm", {"acceptance": "residual", "widths": (2, 2)}),
]
PENALISED = Sampling(1.5, repetition_penalty=1.3, repetition_window=3)


@pytest.mark.parametrize(
    ("method", "options", "sampling"),
    [
        ("tokenswift", {"reuse_n": 2, "view": "none"}, Sampling(1.0)),
        ("tokenswift", {"reuse_n": 2, "budget": 4, "sink": 1, "window": 1}, Sampling(0.6, top_p=0.95)),
        ("tokenswift", {"reuse_n": 2}, PENALISED),
        (*RESIDUAL[1], PENALISED),
        (*RESIDUAL[2], Sampling(1.0)),
        (*RESIDUAL[3], Sampling(0.6, top_p=0.95)),
        (*RESIDUAL[4], Sampling(1.0)),
    ],
    ids=str,
)
def test_sampled_runs_have_the_targets_distribution(tmp_path, method, options, sampling):
    """Chi-square of the joint distribution of four tokens, over a vocabulary of four."""
    size, draws, batch = 4, 1500, 500
    model = tiny_model(vocab=size, layers=1)
    draft = small_lm(tmp_path, size, layers=1) if method == "small-lm" else random_heads(tmp_path, model)
    spec, prompt = Speculator(method, target=model, draft=draft, **options), [1, 2, 3, 1, 2, 0, 1]
    counts = torch.zeros(size, size, size, size, dtype=torch.double)
    accepted = 0
    for start in range(0, draws, batch):
        for r in spec.generate([prompt] * batch, max_new_tokens=4, sampling=sampling, seed=start):
            counts[tuple(r.token_ids)] += 1
            accepted += r.accepted
    expected = torch.ones(1, dtype=torch.double) * draws
    texts = torch.tensor([prompt])
    for _ in range(4):
        with torch.no_grad():
            scores = torch.cat([sampling.processors()(t[None], model(t[None]).logits[:, -1]) for t in texts])
        expected = (expected[:, None] * torch.softmax(scores, -1).double()).flatten()
        following = torch.arange(size).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(size, dim=0), following], dim=1)
    counts = counts.flatten()
    assert accepted > 400, "the draft must have been taken for the test to mean something"
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = wanted > 0
    assert keep.sum() > 15
    assert chisquare(observed[keep], wanted[keep] * draws / wanted[keep].sum()).pvalue > 0.01


@pytest.mark.parametrize(("method", "options"), RESIDUAL, ids=str)
def test_a_seed_fixes_residual_runs_and_greedy_ones_are_plain(tmp_path, method, options):
    model = tiny_model(vocab=11, dtype=torch.float64)
    draft = small_lm(tmp_path, 11) if method == "small-lm" else random_heads(tmp_path, model, kept=[0, 2, 3, 5, 7])
    spec = Speculator(method, target=model, draft=draft, **options)
    runs = [spec.generate(PROMPTS, max_new_tokens=25, sampling=Sampling(1.0), seed=s) for s in (3, 3, 4)]
    texts = [[r.token_ids for r in run] for run in runs]
    assert texts[0] == texts[1] != texts[2]
    alone = spec.generate([PROMPTS[2]], max_new_tokens=25, sampling=Sampling(1.0), seed=5)[0]
    assert len(alone.token_ids) == 25
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=25)
    assert [r.token_ids for r in spec.generate(PROMPTS, max_new_tokens=25)] == [r.token_ids for r in plain]


def test_a_good_draft_is_always_believed_by_residuals(tmp_path):
    """The target's own weights draw from the target's own distribution, processors and all."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    for sampling in (Sampling(1.0), PENALISED, Sampling(0.7, top_p=0.9)):
        lengths = {}
        for acceptance, options in (("residual", {"depth": 3}), ("draw", {"tree": "chain", "depth": 3})):
            spec = Speculator("small-lm", target=model, draft=tmp_path, acceptance=acceptance, **options)
            results = spec.generate(PROMPTS, max_new_tokens=41, sampling=sampling, seed=1)
            lengths[acceptance] = [r.mean_accepted_length for r in results]
        assert lengths["residual"] == [4.0] * 4 and max(lengths["draw"]) < 4


def test_residual_acceptance_in_transformers_generate(tmp_path):
    model = tiny_model(vocab=11)
    spec = Speculator("heads", draft=random_heads(tmp_path, model), acceptance="residual")
    ids = torch.tensor([PROMPTS[0], PROMPTS[0]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=True, top_k=0, custom_generate=spec
    )
    assert out.shape == (2, 68) and not torch.equal(out[0], out[1])


def test_residual_acceptance_where_it_cannot_be(tmp_path):
    model = tiny_model(vocab=11)
    draft = random_heads(tmp_path, model)
    with pytest.raises(ValueError, match="needs verification on the whole cache, which specpv-exact does not do"):
        Speculator("specpv-exact", target=model, draft=draft, acceptance="residual")
    for options, said in (
        ({"acceptance": "coin"}, "acceptance must be draw or residual"),
        ({"acceptance": "residual", "nodes": 4}, "leave nodes out"),
        ({"acceptance": "residual", "tree": "opt"}, "leave tree out"),
        ({"acceptance": "residual", "depth": 0}, "depth must be a whole number"),
        ({"acceptance": "residual", "depth": 2, "widths": (1,)}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=said):
            Speculator("heads", target=model, draft=draft, **options)
    spec = Speculator("heads", target=model, draft=draft, acceptance="residual", plan="auto")
    assert spec.planner() is None  # to leave out what is unlikely would be to draw it otherwise


# --- folders ---


def test_drafts_of_other_kinds(tmp_path):
    model = tiny_model(vocab=11)
    for method in ("heads", "tokenswift"):
        with pytest.raises(OSError, match="holds a draft for longspec"):
            Speculator(method, target=model, draft=random_draft(tmp_path / method, model))
        with pytest.raises(RuntimeError, match=f"Method {method} needs a draft"):
            Speculator(method, target=model)
    with pytest.raises(OSError, match="holds a draft for heads, not for longspec"):
        Speculator("longspec", target=model, draft=random_heads(tmp_path / "own", model))
