"""Layers that see the last rows only: the same text as the model's own, rows that forget, states that go back."""

from __future__ import annotations

from functools import partial

import pytest

from longdraft import PromptCache, Speculator
from longdraft.errors import UnsupportedModelError
from tests.support.drafts import random_draft, random_eagle3
from tests.support.slow_marks import slow
from tests.support.tiny import generate_tokens
from tests.support.tree_logits import random_tokens
from tests.zoo.tiny_models import tiny_model


def window_model(model_type: str = "gemma3_text"):
    window = "attention_chunk_size" if model_type == "llama4_text" else "sliding_window"
    return tiny_model(model_type, max_position_embeddings=8192, **{window: 24})


METHODS = {
    "ar": {},
    "prompt-lookup": {"min_n": 1},
    "self": {"budget": 64},
    "quantspec": {},
    "magicdec": {},
    "longspec": {"draft": random_draft},
    "eagle3": {"draft": partial(random_eagle3, layers=(0, 1, 2))},
}
# Other models with windows write their own text in tests/zoo.
CASES = [("gemma3_text", method) for method in ("prompt-lookup", "self", "longspec", "eagle3")]
CASES += [("mistral", "self"), *(slow("gemma3_text", method) for method in ("ar", "quantspec", "magicdec"))]
CASES += [("llama4_text", "prompt-lookup")]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_a_model_with_windows_writes_its_own_text(name, method, tmp_path):
    """Beyond its windows, in them, and shorter than one."""
    model, options = window_model(name), dict(METHODS[method])
    if "draft" in options:
        options["draft"] = options["draft"](tmp_path / "draft", model)
    spec = Speculator(method, target=model, plan="fixed", **options)
    prompts = [random_tokens(300 if name == "gemma3_text" else 60), random_tokens(20, 1), random_tokens(3, 2)]
    results = spec.generate(prompts, max_new_tokens=20)
    assert [r.token_ids for r in results] == [generate_tokens(model, prompt, 20) for prompt in prompts]
    assert method == "ar" or sum(r.drafted for r in results) > 0
    assert method not in ("self", "quantspec", "magicdec") or all(r.mean_accepted_length > 1 for r in results)


@pytest.mark.parametrize(("method", "options"), [("specpv", {}), ("longspec", {"draft": random_draft})])
def test_methods_that_need_a_full_layer_say_so(method, options, tmp_path):
    model = window_model("mistral")
    if "draft" in options:
        options = {"draft": options["draft"](tmp_path / "draft", model)}
    with pytest.raises(UnsupportedModelError):
        Speculator(method, target=model, **options).generate([random_tokens(9)], max_new_tokens=2)


def test_the_rows_of_a_window_do_not_grow_with_the_text_and_a_cache_goes_back_as_far_as_they_reach(tmp_path):
    """A text longer than the buffer is the model's own, and so is what begins like it."""
    model, first = window_model(), random_tokens(2700)
    spec, cache = Speculator("prompt-lookup", target=model), PromptCache()
    short, long = (spec.runner().new_store(1, n).states[0] for n in (4096, 8192))
    assert short.bytes_per_slot == long.bytes_per_slot and long.buffer_len < len(first)
    for prompt in (first, first[:2690] + random_tokens(30, 6), first[:900] + random_tokens(40, 7)):
        (result,) = spec.generate([prompt], max_new_tokens=6, cache=cache)
        assert result.token_ids == generate_tokens(model, prompt, 6)
    cache.save(tmp_path / "kv", spec.runner().fingerprint)
    restored = PromptCache.restored(tmp_path / "kv", spec.runner().fingerprint)
    (again,) = spec.generate([prompt], max_new_tokens=6, cache=restored)
    assert again.token_ids == result.token_ids and again.cached_tokens == len(prompt) - 1
