"""The engine, end to end on tiny models; that it is exact, ragged and stopped as it should be: tests/exactness."""

from __future__ import annotations

import pytest
import torch

import longdraft
from longdraft import PromptCache, Speculator
from longdraft.errors import CapabilityError, ContextError, MemoryBudgetError, PromptError, UnknownMethodError
from tests.tiny import FAMILIES, tiny_model

# A text that repeats, so that prompt lookup has something to find, and one that does not.
REPEATING = [3, 9, 14, 7, 22, 5] * 8
PROMPTS = [REPEATING, [1, 2, 3], list(range(40)), [17]]


def greedy_by_transformers(model, prompt, n):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_greedy_gives_the_tokens_of_transformers(family, method):
    model = tiny_model(family)
    spec = Speculator(method, target=model)
    for prompt in PROMPTS:
        got = spec.generate([prompt], max_new_tokens=24)[0].token_ids
        assert got == greedy_by_transformers(model, prompt, 24)


def test_the_models_own_eos_is_the_default():
    model = tiny_model()
    free = Speculator("ar", target=model).generate([[4, 5]], max_new_tokens=20)[0].token_ids
    model.generation_config.eos_token_id = [free[5], 60]
    result = Speculator("ar", target=model).generate([[4, 5]], max_new_tokens=20)[0]
    assert result.finish_reason == "eos" and result.token_ids[-1] == free[5]


def test_steps_add_up_to_the_result():
    spec = Speculator("prompt-lookup", target=tiny_model(vocab=11), min_n=1)
    run = spec.stream([[1, 2, 3, 1, 2], [4] * 9], max_new_tokens=25)
    steps = list(run)
    for i, result in enumerate(run.results()):
        mine = [s for s in steps if s.sequence == i]
        assert [t for s in mine for t in s.token_ids] == result.token_ids
        assert sum(s.mode == "full" for s in mine) == result.rounds
        assert sum(s.accepted for s in mine) == result.accepted == sum(result.from_draft)
        assert mine[-1].finish_reason == result.finish_reason
        assert all(s.finish_reason is None for s in mine[:-1])
        assert result.mean_accepted_length == (result.new_tokens - 1) / result.rounds


def test_autoregressive_decoding_has_a_mean_accepted_length_of_one():
    assert Speculator("ar", target=tiny_model()).generate([[1, 2]], max_new_tokens=9)[0].mean_accepted_length == 1.0


def test_cancelling_ends_the_run_and_keeps_what_there_is():
    count = 0

    def cancelled():
        nonlocal count
        count += 1
        return count > 6

    spec = Speculator("ar", target=tiny_model())
    result = spec.generate([[1, 2, 3]], max_new_tokens=50, cancelled=cancelled)[0]
    assert result.finish_reason == "cancelled"
    assert result.token_ids == spec.generate([[1, 2, 3]], max_new_tokens=50)[0].token_ids[: result.new_tokens]
    assert 0 < result.new_tokens < 50


def test_a_kept_cache_is_read_once_and_gives_the_same_tokens():
    spec = Speculator("prompt-lookup", target=tiny_model(dtype=torch.float64))
    cache = PromptCache()
    first = spec.generate([REPEATING], max_new_tokens=20, cache=cache)[0]
    run = spec.stream([REPEATING], max_new_tokens=20, cache=cache)
    prefill = [s for s in run if s.mode == "prefill"]
    assert len(prefill) == 1 and run.results()[0].token_ids == first.token_ids
    # A longer prompt with the same beginning, and a different one, in the same cache.
    for prompt in ([*REPEATING, *first.token_ids, 4], [8, 9]):
        kept = spec.generate([prompt], max_new_tokens=20, cache=cache)[0].token_ids
        assert kept == spec.generate([prompt], max_new_tokens=20)[0].token_ids


def test_a_snapshot_carries_the_prompt_to_another_run(tmp_path):
    spec = Speculator("ar", target=tiny_model(dtype=torch.float64))
    cache = PromptCache()
    first = spec.generate([REPEATING], max_new_tokens=10, cache=cache)[0]
    cache.save(tmp_path / "kv.safetensors", spec.runner().fingerprint)
    restored = PromptCache.restored(tmp_path / "kv.safetensors", spec.runner().fingerprint)
    run = spec.stream([REPEATING], max_new_tokens=10, cache=restored)
    assert sum(s.mode == "prefill" for s in run) == 1
    assert run.results()[0].token_ids == first.token_ids
    other = Speculator("ar", target=tiny_model(seed=1, dtype=torch.float64))
    wrong = PromptCache.restored(tmp_path / "kv.safetensors", other.runner().fingerprint)
    with pytest.raises(longdraft.errors.CheckpointError):
        other.generate([REPEATING], max_new_tokens=10, cache=wrong)


def test_bad_requests_are_refused_before_any_work(forwards, free_memory):
    model = tiny_model(context=64)
    spec = Speculator("ar", target=model)
    with pytest.raises(PromptError):
        spec.generate([[]], max_new_tokens=4)
    with pytest.raises(ContextError):
        spec.generate([[1] * 60], max_new_tokens=5)
    with pytest.raises(ValueError, match="max_new_tokens"):
        spec.generate([[1]], max_new_tokens=0)
    with pytest.raises(CapabilityError):
        spec.generate("text", max_new_tokens=4)
    free_memory(1000)
    with pytest.raises(MemoryBudgetError):
        spec.generate([[1] * 30], max_new_tokens=5)
    assert not forwards


def test_an_unknown_method_or_option_names_those_there_are():
    with pytest.raises(UnknownMethodError):
        Speculator("lookahead")
    with pytest.raises(ValueError, match="max_draft"):
        Speculator("prompt-lookup", breadth=3)


def test_methods_are_listed_as_the_contract_says():
    listed = {m["name"]: m for m in longdraft.methods()}
    assert set(listed) >= {"ar", "prompt-lookup"}
    assert all(set(m) == {"name", "exact", "needs_draft", "paper", "available"} for m in listed.values())
