"""LongSpec end to end, with random drafts on tiny models: whatever is drafted, the output is the target's."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from longdraft import PromptCache, Sampling, Speculator
from tests.drafts import random_draft
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [i % 11 for i in range(40)], [8]]


def pair(model, folder, **options):
    """LongSpec, and plain decoding of the same target."""
    draft = random_draft(folder, model, kept=options.pop("kept", None))
    return Speculator(draft, target=model, **options), Speculator("ar", target=model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"widths": (4, 5, 3), "nodes": 7},
        {"widths": (1, 1, 1)},
        {"widths": (2,), "kept": [1, 2, 3, 4, 7]},
        {"tree": "opt", "threshold": 0.1, "depth": 5},
    ],
    ids=str,
)
def test_greedy_gives_the_tokens_of_plain_decoding(tmp_path, family, options):
    spec, ar = pair(tiny_model(family, vocab=11), tmp_path, **dict(options))
    accepted = 0
    for prompt in PROMPTS:
        result = spec.generate([prompt], max_new_tokens=40)[0]
        assert result.token_ids == ar.generate([prompt], max_new_tokens=40)[0].token_ids
        assert (result.method, result.exact) == ("longspec", True)
        accepted += result.accepted
    assert accepted > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)])
def test_a_ragged_batch_equals_its_prompts_one_by_one(tmp_path, sampling):
    spec, ar = pair(tiny_model(vocab=11, dtype=torch.float64), tmp_path, widths=(3, 4, 4))
    together = spec.generate(PROMPTS, max_new_tokens=30, sampling=sampling, seed=5)
    for i, prompt in enumerate(PROMPTS):
        alone = spec.generate([prompt], max_new_tokens=30, sampling=sampling, seed=5 + i)[0]
        plain = ar.generate([prompt], max_new_tokens=30, sampling=sampling, seed=5 + i)[0]
        assert together[i].token_ids == alone.token_ids == plain.token_ids
        assert together[i].rounds == alone.rounds and together[i].accepted == alone.accepted


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_budgets_smaller_than_the_tree_is_deep(tmp_path, n):
    spec, ar = pair(tiny_model(vocab=11), tmp_path)
    results = spec.generate(PROMPTS, max_new_tokens=n)
    assert [r.token_ids for r in results] == [r.token_ids for r in ar.generate(PROMPTS, max_new_tokens=n)]
    # A tree of depth k serves k + 1 tokens: nothing is drafted that could not be emitted.
    assert all((r.drafted == 0) == (n <= 2) or n == 2 for r in results)


def test_up_to_the_last_position_of_the_context(tmp_path):
    spec, ar = pair(tiny_model(vocab=11, context=64), tmp_path)
    prompt = [i % 11 for i in range(50)]
    assert (
        spec.generate([prompt], max_new_tokens=14)[0].token_ids == ar.generate([prompt], max_new_tokens=14)[0].token_ids
    )


def test_it_ends_at_an_end_of_sequence_token_inside_a_draft(tmp_path):
    spec, ar = pair(tiny_model(vocab=11), tmp_path)
    text = ar.generate([PROMPTS[1]], max_new_tokens=40)[0].token_ids
    for eos in set(text):
        got = spec.generate([PROMPTS[1], PROMPTS[3]], max_new_tokens=40, eos_token_ids=[eos])[0]
        assert got.token_ids == text[: text.index(eos) + 1] and got.finish_reason == "eos"


def test_it_ends_at_a_stop_string(tmp_path):
    model = tiny_model(vocab=61)
    draft = random_draft(tmp_path, model)
    ar, spec = (Speculator(m, target=model, tokenizer=tiny_tokenizer()) for m in ("ar", draft))
    whole = ar.generate([[7, 8, 9]], max_new_tokens=40)[0].text
    stop = whole[9:11]
    for s in (ar, spec):
        result = s.generate([[7, 8, 9]], max_new_tokens=40, stop=[stop])[0]
        assert result.text == whole[: whole.index(stop)] and result.finish_reason == "stop"


def test_a_kept_cache_is_taken_up_again(tmp_path):
    spec, ar = pair(tiny_model(vocab=11, dtype=torch.float64), tmp_path)
    cache = PromptCache()
    first = spec.generate([PROMPTS[0]], max_new_tokens=20, cache=cache)[0]
    for prompt in ([*PROMPTS[0], *first.token_ids, 4], [8, 9], PROMPTS[0]):
        kept = spec.generate([prompt], max_new_tokens=20, cache=cache)[0].token_ids
        assert kept == ar.generate([prompt], max_new_tokens=20)[0].token_ids


def test_a_closed_run_and_two_runs_at_once(tmp_path):
    spec, ar = pair(tiny_model(vocab=11, dtype=torch.float64), tmp_path)
    cut = spec.stream([PROMPTS[0]], max_new_tokens=30)
    next(iter(cut)), next(iter(cut))
    cut.close()
    one, two = (spec.stream([p], max_new_tokens=30) for p in PROMPTS[:2])
    for _ in range(4):  # step by step in turn: runs share the draft's weights and nothing else
        next(iter(one), None), next(iter(two), None)
    expected = [ar.generate([p], max_new_tokens=30)[0].token_ids for p in PROMPTS[:2]]
    assert [r.results()[0].token_ids for r in (one, two)] == expected


@pytest.mark.parametrize(
    "settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 7}], ids=str
)
def test_custom_generate(tmp_path, settings):
    model = tiny_model(vocab=11, dtype=torch.float64)
    spec = Speculator.from_pretrained(random_draft(tmp_path, model))
    ids = torch.tensor([[3, 9, 4, 7, 2, 5] * 6])
    outputs = []
    for extra in ({}, {"custom_generate": spec}):
        torch.manual_seed(0)
        outputs.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, **settings, **extra))
    assert torch.equal(*outputs)


def test_custom_generate_with_padding(tmp_path):
    model = tiny_model(vocab=11, dtype=torch.float64)
    spec = Speculator(random_draft(tmp_path, model))
    ids = torch.tensor([[0, 0, 0, 1, 2, 3], [4, 5, 6, 7, 8, 9]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    settings = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, **settings, custom_generate=spec))


def test_sampled_runs_have_the_targets_distribution(tmp_path):
    """Chi-square of the joint distribution of four tokens, over a vocabulary of four."""
    size, draws, batch = 4, 2000, 500
    model = tiny_model(vocab=size, layers=1)
    spec, _ = pair(model, tmp_path, widths=(2, 3))
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
