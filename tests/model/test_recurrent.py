"""Models with recurrent layers: rows equal plain rows to the bit, and what is rejected leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from longdraft import PromptCache, Request, Result, Sampling, Speculator
from longdraft.errors import UnsupportedModelError
from tests.native.levels import needs_kernels
from tests.support.drafts import random_eagle3, random_heads
from tests.support.recurrent_models import KINDS, recurrent_model, some_prompt
from tests.support.slow_marks import rotate_pairs, slow, slow_except
from tests.support.tiny import generate_tokens, tiny_tokenizer

NEW = 24
in_bits = needs_kernels  # without them torch's products round a row by the number of rows


@pytest.mark.parametrize("family", slow_except(KINDS, ("qwen3_5_text", "mamba")))
def test_a_cache_and_a_snapshot_go_back_to_where_a_state_was_kept(family, tmp_path):
    """The committed end, the prompt's end, and no state in between; then a larger store takes the states over."""
    model, prompt = recurrent_model(family), some_prompt(37)
    spec, file = Speculator("prompt-lookup", target=model, plan="fixed", branches=2, min_n=1), tmp_path / "kv"

    def first() -> tuple[PromptCache, list[int]]:
        cache = PromptCache()
        return cache, spec.generate([prompt], max_new_tokens=8, cache=cache)[0].token_ids

    cache, output = first()
    cache.save(file, spec.runner().fingerprint)
    for text, reused in (([*prompt, *output, 5], 44), ([*prompt, 1, 2], 37), ([*prompt[:20], 3, 4], 0)):
        own = generate_tokens(model, text, 40)
        for cache in (first()[0], PromptCache.restored(file, spec.runner().fingerprint)):
            (result,) = spec.generate([text], max_new_tokens=40, cache=cache)
            assert (result.token_ids, result.cached_tokens) == (own, reused)
            assert result.drafted > result.accepted


# --- end to end ---

METHODS: dict[str, dict[str, Any]] = {
    "prompt-lookup": {"branches": 3, "min_n": 1},
    "suffix": {},
    "self": {"view": "streaming", "budget": 12, "sink": 2, "window": 2},
    "magicdec": {"view": "snapkv", "budget": 24, "window": 4},
}
PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], some_prompt(130), [8]]


@in_bits
@pytest.mark.parametrize(("method", "family"), rotate_pairs(METHODS, ["qwen3_5_text", "lfm2"]))
def test_methods_write_the_plain_text(family, method):
    model = recurrent_model(family)
    results: list[Result] = []
    for sampling in (Sampling(), Sampling(temperature=0.9, top_k=8)):
        requests = [Request(p, NEW, sampling, seed=i) for i, p in enumerate(PROMPTS)]
        plain = Speculator("ar", target=model).generate(requests)
        spec = Speculator(method, target=model, plan="fixed", **METHODS[method])
        # Lookups find the text itself, but for a token in its middle.
        known = [[*r.token_ids[: NEW // 2], 0, *r.token_ids[NEW // 2 + 1 :]] for r in plain]
        drafted = spec.generate([replace(r, predicted=k) for r, k in zip(requests, known, strict=True)])
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        assert sum(r.rounds for r in drafted) < sum(r.rounds for r in plain)
        results += drafted
    assert 0 < sum(r.accepted for r in results) < sum(r.drafted for r in results)


@in_bits
@pytest.mark.parametrize("kind", ["eagle3", "tokenswift", "small-lm"])
def test_trained_drafts_draft_for_it(kind, tmp_path):
    model = recurrent_model()
    drafts = {
        "eagle3": lambda: random_eagle3(tmp_path, model, layers=(0, 1, 3)),
        "tokenswift": lambda: random_heads(tmp_path, model),
        "small-lm": lambda: as_draft(tmp_path, model),  # which has recurrent layers too
    }
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=NEW)
    drafted = Speculator(kind, target=model, draft=drafts[kind](), plan="fixed").generate(PROMPTS, max_new_tokens=NEW)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    # A random draft is hardly ever right, and the model as its own draft never wrong.
    assert sum(r.drafted for r in drafted) > (0 if kind == "small-lm" else sum(r.accepted for r in drafted))
    assert kind != "small-lm" or sum(r.rounds for r in drafted) < sum(r.rounds for r in plain) / 2


def as_draft(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["qwen3_5_text", slow("falcon_h1")])
def test_a_long_prompt_is_prefilled_chunk_by_chunk(family):
    model, prompt = recurrent_model(family), some_prompt(2600)
    spec = Speculator("prompt-lookup", target=model, plan="fixed", branches=2, min_n=1)
    cache = PromptCache()
    expected = generate_tokens(model, prompt, 12)
    assert spec.generate([prompt], max_new_tokens=12, cache=cache)[0].token_ids == expected
    (again,) = spec.generate([[*prompt[:2500], 7, 8, 9]], max_new_tokens=12, cache=cache)
    assert again.token_ids == generate_tokens(model, [*prompt[:2500], 7, 8, 9], 12)
    assert again.cached_tokens == 2048


def test_what_cannot_be_exact_is_refused():
    model = recurrent_model()
    with pytest.raises(UnsupportedModelError, match="SpecPV"):
        Speculator("specpv", target=model, drafter="prompt-lookup").generate([PROMPTS[0]], max_new_tokens=4)
