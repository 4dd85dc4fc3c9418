"""A small language model that drafts, end to end and in every view: whatever is drafted, the output is the target's."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from longdraft import PromptCache, Sampling, Speculator
from longdraft.drafters import small_lm_cache
from longdraft.errors import CapabilityError, CheckpointError
from tests.drafts import random_draft, small_lm
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
FULL = {"depth": 3, "top_k": 3, "nodes": 8}
STREAMING = {"view": "streaming", "sink": 4, "recent": 12, "widths": (3, 4, 4)}
RETRIEVAL = {"view": "retrieval", "sink": 4, "recent": 8, "chunk": 4, "chunks": 4, "every": 2, "threshold": 0.2}
views = pytest.mark.parametrize("view", [FULL, STREAMING, RETRIEVAL, RETRIEVAL | {"adaptive": True}], ids=str)


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch):
    monkeypatch.setattr(small_lm_cache, "FRESH", 8)
    monkeypatch.setattr(small_lm_cache, "PIECE", 16)


def pair(model, folder, draft=None, **options):
    """The method, and plain decoding of the same target."""
    vocab = model.config.vocab_size
    spec = Speculator("small-lm", target=model, draft=small_lm(folder, vocab, **(draft or {})), **options)
    return spec, Speculator("ar", target=model)


@pytest.mark.parametrize("family", FAMILIES)
@views
def test_greedy_gives_the_tokens_of_plain_decoding(tmp_path, family, view):
    spec, ar = pair(tiny_model(family, vocab=11), tmp_path, **view)
    accepted = 0
    for prompt in PROMPTS:
        result = spec.generate([prompt], max_new_tokens=40)[0]
        assert result.token_ids == ar.generate([prompt], max_new_tokens=40)[0].token_ids
        assert (result.method, result.exact) == ("small-lm", True)
        accepted += result.accepted
    assert accepted > 0


@pytest.mark.parametrize("view", [{"widths": (1, 1, 1)}, STREAMING, RETRIEVAL], ids=str)
def test_a_good_draft_is_believed(tmp_path, view):
    """The target's own weights: in full view, all that is drafted is emitted."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    results = Speculator("small-lm", target=model, draft=tmp_path, **view).generate(PROMPTS, max_new_tokens=41)
    expected = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=41)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    lengths = [r.mean_accepted_length for r in results]
    assert "view" in view or lengths == [4.0] * 4
    assert max(lengths) > 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)])
@views
def test_a_ragged_batch_equals_its_prompts_one_by_one(tmp_path, sampling, view):
    spec, ar = pair(tiny_model(vocab=11, dtype=torch.float64), tmp_path, **view)
    together = spec.generate(PROMPTS, max_new_tokens=30, sampling=sampling, seed=5)
    for i, prompt in enumerate(PROMPTS):
        alone = spec.generate([prompt], max_new_tokens=30, sampling=sampling, seed=5 + i)[0]
        plain = ar.generate([prompt], max_new_tokens=30, sampling=sampling, seed=5 + i)[0]
        assert together[i].token_ids == alone.token_ids == plain.token_ids
        assert together[i].rounds == alone.rounds and together[i].accepted == alone.accepted


@views
def test_two_requests_equal_two_fresh_ones(tmp_path, view):
    model = tiny_model(vocab=11, dtype=torch.float64)
    spec, _ = pair(model, tmp_path, **view)
    for prompts in (PROMPTS[:2], PROMPTS[2:]):
        fresh = Speculator("small-lm", target=model, draft=tmp_path, **view).generate(prompts, max_new_tokens=30)
        again = spec.generate(prompts, max_new_tokens=30)
        assert [(r.token_ids, r.accepted, r.rounds) for r in again] == [
            (r.token_ids, r.accepted, r.rounds) for r in fresh
        ]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_budgets_smaller_than_the_tree_is_deep(tmp_path, n):
    spec, ar = pair(tiny_model(vocab=11), tmp_path, depth=5, top_k=2)
    results = spec.generate(PROMPTS, max_new_tokens=n)
    assert [r.token_ids for r in results] == [r.token_ids for r in ar.generate(PROMPTS, max_new_tokens=n)]
    assert all((r.drafted == 0) == (n <= 2) or n == 2 for r in results)


def test_up_to_the_last_position_of_the_context(tmp_path):
    spec, ar = pair(tiny_model(vocab=11, context=64), tmp_path, {"context": 64})
    prompt = [i % 11 for i in range(50)]
    assert (
        spec.generate([prompt], max_new_tokens=14)[0].token_ids == ar.generate([prompt], max_new_tokens=14)[0].token_ids
    )


def test_it_ends_where_plain_decoding_ends(tmp_path):
    model = tiny_model(vocab=61)
    draft = small_lm(tmp_path, 61)
    ar = Speculator("ar", target=model, tokenizer=tiny_tokenizer())
    spec = Speculator("small-lm", target=model, tokenizer=tiny_tokenizer(), draft=draft, **FULL)
    plain = ar.generate([[7, 8, 9]], max_new_tokens=30)[0]
    for eos in sorted(set(plain.token_ids))[:6]:
        got = spec.generate([[7, 8, 9], [1]], max_new_tokens=30, eos_token_ids=[eos])[0]
        assert got.token_ids == plain.token_ids[: plain.token_ids.index(eos) + 1] and got.finish_reason == "eos"


@views
def test_a_kept_cache_is_taken_up_again(tmp_path, view):
    """The target's KV is; the draft reads the text again."""
    spec, ar = pair(tiny_model(vocab=11, dtype=torch.float64), tmp_path, **view)
    cache = PromptCache()
    first = ar.generate([PROMPTS[0]], max_new_tokens=20, cache=cache)[0]
    for prompt in ([*PROMPTS[0], *first.token_ids, 4], [8, 9], PROMPTS[0]):
        kept = spec.generate([prompt], max_new_tokens=20, cache=cache)[0]
        assert kept.token_ids == ar.generate([prompt], max_new_tokens=20)[0].token_ids


def test_a_closed_run_and_two_runs_at_once(tmp_path):
    spec, ar = pair(tiny_model(vocab=11, dtype=torch.float64), tmp_path, **RETRIEVAL)
    cut = spec.stream([PROMPTS[0]], max_new_tokens=30)
    next(iter(cut)), next(iter(cut))
    cut.close()
    one, two = (spec.stream([p], max_new_tokens=30) for p in PROMPTS[1:3])
    for _ in range(4):  # step by step in turn: runs share the draft's weights and nothing else
        next(iter(one), None), next(iter(two), None)
    expected = [ar.generate([p], max_new_tokens=30)[0].token_ids for p in PROMPTS[1:3]]
    assert [r.results()[0].token_ids for r in (one, two)] == expected


@pytest.mark.parametrize(
    "settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 7}], ids=str
)
def test_custom_generate(tmp_path, settings):
    model = tiny_model(vocab=11, dtype=torch.float64)
    spec = Speculator.from_pretrained(small_lm(tmp_path))
    ids = torch.tensor([PROMPTS[0]])
    outputs = []
    for extra in ({}, {"custom_generate": spec}):
        torch.manual_seed(0)
        outputs.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, **settings, **extra))
    assert torch.equal(*outputs)


@views
def test_a_draft_that_overflows_only_costs_time(tmp_path, view):
    model = tiny_model(vocab=11)
    spec, ar = pair(model, tmp_path, **view)
    inner = spec.options["draft"].bound(spec.runner()).runner.model
    with torch.no_grad():
        inner.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    expected = ar.generate(PROMPTS, max_new_tokens=12)
    assert [r.token_ids for r in spec.generate(PROMPTS, max_new_tokens=12)] == [r.token_ids for r in expected]


@pytest.mark.parametrize("offload", [None, "disk"])
@pytest.mark.parametrize("method", ["specpv", "specpv-exact"])
def test_specpv_takes_it_for_a_drafter(tmp_path, method, offload):
    """Guesses are taken back in the exact tier: the draft's text goes on otherwise then."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    sizes = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6}
    folder = small_lm(tmp_path / "draft")
    where = tmp_path if offload else None
    for view in ({}, {"view": "retrieval", "chunk": 4, "chunks": 4, "every": 1}):
        spec = Speculator(method, target=model, draft=folder, offload=where, **sizes, **view)
        results = spec.generate(PROMPTS, max_new_tokens=30)
        assert all(len(r.token_ids) == 30 for r in results) and sum(r.accepted for r in results) > 0
        if method == "specpv-exact":
            want = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=30)
            assert [r.token_ids for r in results] == [r.token_ids for r in want]
            assert sum(r.rolled_back for r in results) > 0


@pytest.mark.parametrize(
    "view",
    [
        {"widths": (2, 3)},
        STREAMING | {"recent": 3, "sink": 1, "widths": (2, 3)},
        {"view": "retrieval", "recent": 1, "sink": 1, "chunk": 1, "chunks": 2, "every": 1, "nodes": 6},
    ],
    ids=str,
)
def test_sampled_runs_have_the_targets_distribution(tmp_path, view):
    """Chi-square of the joint distribution of four tokens, over a vocabulary of four."""
    size, draws, batch = 4, 2000, 500
    model = tiny_model(vocab=size, layers=1)
    spec, _ = pair(model, tmp_path, {"layers": 1}, **view)
    sampling, prompt = Sampling(2.0, top_k=3), [1, 2, 3, 1, 2, 0, 1]
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
            scores = sampling.processors()(texts, model(texts).logits[:, -1])
        expected = (expected[:, None] * torch.softmax(scores, -1).double()).flatten()
        following = torch.arange(size).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(size, dim=0), following], dim=1)
    counts = counts.flatten()
    assert accepted > 500, "the draft must have been taken for the test to mean something"
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = wanted > 0
    assert keep.sum() > 20
    assert chisquare(observed[keep], wanted[keep] * draws / wanted[keep].sum()).pvalue > 0.01


# --- methods and folders ---


def test_a_folder_of_transformers_is_a_method_with_its_draft(tmp_path):
    model, folder = tiny_model(vocab=11), small_lm(tmp_path / "draft")
    for spec in (
        Speculator(folder, target=model),
        Speculator(str(folder), target=model),
        Speculator("small-lm", target=model, draft=str(folder)),
        Speculator(target=model, draft=folder),
    ):
        assert spec.method.name == "small-lm"
    spec = Speculator("specextend", target=model, draft=folder, sink=4, recent=8, chunk=4)
    drafter = spec._recipe(spec.runner()).drafter()
    assert (drafter.view, drafter.max_nodes, drafter.retrieval.chunks) == ("retrieval", 50, 32)
    expected = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=12)
    results = spec.generate(PROMPTS, max_new_tokens=12)
    assert [(r.token_ids, r.method) for r in results] == [(r.token_ids, "specextend") for r in expected]


def test_models_in_several_files(tmp_path):
    model = tiny_model(vocab=11)
    draft = tiny_model(vocab=11, layers=2, seed=1)
    draft.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert Speculator(tmp_path, target=model).method.name == "small-lm"


def test_drafts_of_other_kinds(tmp_path):
    model = tiny_model(vocab=11)
    longspec = random_draft(tmp_path / "longspec", model)
    with pytest.raises(CheckpointError, match="holds a draft for longspec, not for small-lm"):
        Speculator("specextend", target=model, draft=longspec)
    with pytest.raises(CheckpointError, match="does not have the target's vocabulary"):
        Speculator("small-lm", target=model, draft=small_lm(tmp_path / "other", vocab=12))
    with pytest.raises(CapabilityError, match="Method specextend needs a draft"):
        Speculator("specextend", target=model)
    with pytest.raises(ValueError, match="view must be"):
        Speculator("small-lm", draft=small_lm(tmp_path / "own"), view="some")
