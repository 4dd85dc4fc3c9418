"""Chained heads, TokenSwift and residual acceptance as methods. That the output is the target's: tests/exactness."""

from __future__ import annotations

import pytest
import torch

from longdraft import Sampling, Speculator
from tests.drafts import random_draft, random_heads, small_lm
from tests.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
PENALISED = Sampling(1.5, repetition_penalty=1.3, repetition_window=3)
RESIDUAL = [
    ("heads", {"acceptance": "residual"}),
    ("tokenswift", {"acceptance": "residual", "widths": (2, 2), "reuse_n": 2, "view": "none"}),
    ("tokenswift", {"acceptance": "residual", "widths": (1, 2), "budget": 4, "sink": 1, "window": 1}),
    ("small-lm", {"acceptance": "residual", "depth": 3}),
    ("small-lm", {"acceptance": "residual", "widths": (2, 2)}),
]


def test_specpv_takes_them_for_a_drafter(tmp_path):
    model = tiny_model(vocab=11, dtype=torch.float64)
    sizes = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6}
    spec = Speculator("specpv", target=model, draft=random_heads(tmp_path, model), **sizes)
    results = spec.generate(PROMPTS, max_new_tokens=30)
    assert all(len(r.token_ids) == 30 for r in results) and sum(r.accepted for r in results) > 0


@pytest.mark.parametrize(("method", "options"), RESIDUAL, ids=str)
def test_a_seed_fixes_residual_runs_and_greedy_ones_are_plain(tmp_path, method, options):
    model = tiny_model(vocab=11, dtype=torch.float64)
    draft = small_lm(tmp_path, 11) if method == "small-lm" else random_heads(tmp_path, model, kept=[0, 2, 3, 5, 7])
    spec = Speculator(method, target=model, draft=draft, **options)
    runs = [spec.generate(PROMPTS, max_new_tokens=14, sampling=Sampling(1.0), seed=s) for s in (3, 3, 4)]
    texts = [[r.token_ids for r in run] for run in runs]
    assert texts[0] == texts[1] != texts[2]
    alone = spec.generate([PROMPTS[2]], max_new_tokens=14, sampling=Sampling(1.0), seed=5)[0]
    assert len(alone.token_ids) == 14
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=14)
    assert [r.token_ids for r in spec.generate(PROMPTS, max_new_tokens=14)] == [r.token_ids for r in plain]


def test_a_good_draft_is_always_believed(tmp_path):
    """The target's own weights say the target's own distribution. A sampler's processors are those of the path where
    tokens are sampled for residuals, and those that look at scores alone where coming samples are foreseen."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    for sampling in (Sampling(1.0), PENALISED, Sampling(0.7, top_p=0.9)):
        lengths = {}
        for acceptance, options in (("residual", {"depth": 3}), ("draw", {"tree": "chain", "depth": 3})):
            spec = Speculator("small-lm", target=model, draft=tmp_path, acceptance=acceptance, **options)
            results = spec.generate(PROMPTS, max_new_tokens=41, sampling=sampling, seed=1)
            lengths[acceptance] = [r.mean_accepted_length for r in results]
        assert lengths["residual"] == [4.0] * 4
        assert (lengths["draw"] == [4.0] * 4) == (sampling is not PENALISED)


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


def test_drafts_of_other_kinds(tmp_path):
    model = tiny_model(vocab=11)
    for method in ("heads", "tokenswift"):
        with pytest.raises(OSError, match="holds a draft for longspec"):
            Speculator(method, target=model, draft=random_draft(tmp_path / method, model))
        with pytest.raises(RuntimeError, match=f"Method {method} needs a draft"):
            Speculator(method, target=model)
    with pytest.raises(OSError, match="holds a draft for heads, not for longspec"):
        Speculator("longspec", target=model, draft=random_heads(tmp_path / "own", model))
