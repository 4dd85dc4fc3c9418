"""A target whose KV is rounded: another model, if only by a little, and the same one for every method."""

from __future__ import annotations

import pytest
import torch

from longdraft import PromptCache, Speculator
from longdraft.errors import CapabilityError
from tests.support.drafts import random_draft, small_lm
from tests.support.slow_marks import rotate_pairs
from tests.support.tiny import tiny_model
from tests.zoo.tiny_models import tiny_model as zoo_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)]]
CHUNKS = {"view": "chunks", "chunk": 4, "sink": 4, "budget": 24, "window": 4, "refresh": 2}
rounded = pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "int4"])


def tokens(spec: Speculator, n: int = 30, **settings) -> list[list[int]]:
    results = spec.generate(PROMPTS, max_new_tokens=n, **settings)
    assert not any(r.exact for r in results)
    return [r.token_ids for r in results]


METHODS = [
    ("prompt-lookup", {"min_n": 1}),
    ("self", CHUNKS),
    ("self", {"view": "snapkv", "budget": 24, "window": 4}),
    ("quantspec", {}),
    ("specextend", {"view": "retrieval", "sink": 4, "recent": 8, "chunk": 4, "chunks": 4, "every": 2}),
    ("longspec", {"widths": (3, 2)}),
]


@pytest.mark.parametrize(("case", "kv_dtype"), rotate_pairs(METHODS, ["int8", "bfloat16", "int4"], 2), ids=str)
def test_every_method_writes_what_plain_decoding_on_that_kv_writes(tmp_path, case, kv_dtype):
    (method, options), model = case, tiny_model(vocab=11, dtype=torch.float32)
    drafts = {"specextend": lambda: small_lm(tmp_path, 11), "longspec": lambda: random_draft(tmp_path, model)}
    draft = {"draft": drafts[method]()} if method in drafts else {}
    spec = Speculator(method, target=model, kv_dtype=kv_dtype, plan="fixed", **draft, **options)
    assert not spec.exact and spec.method.exact
    assert tokens(spec) == tokens(Speculator("ar", target=model, kv_dtype=kv_dtype))


@pytest.mark.parametrize(
    ("kv_dtype", "model_type", "most"),
    [
        *((kv_dtype, name, 0.1) for kv_dtype in ("bfloat16", "int8") for name in ("llama", "deepseek_v3")),
        ("int4", "llama", 1.6),  # its steps are 16 times as large as those of int8
    ],
)  # deepseek_v3: keys are wider than values
def test_its_logits_are_near_the_models_own(kv_dtype, model_type, most):
    model = zoo_model(model_type).float()
    logits = []
    for rounding in (None, kv_dtype):
        runner = Speculator("ar", target=model, kv_dtype=rounding).runner()
        store = runner.new_store(1, 140)
        runner.forward(store.make_forward_batch([0], [PROMPTS[2]], is_prefill=True), store, logits="none")
        store.commit(0, range(130))
        logits.append(runner.forward(store.make_forward_batch([0], [[5]]), store).logits)
    difference = float((logits[0] - logits[1]).abs().max()) / float(logits[0].std())
    assert 0 < difference < most


@rounded
def test_kv_that_was_kept_as_another_is_read_again(kv_dtype):
    model, cache = tiny_model(vocab=11, dtype=torch.float32), PromptCache()
    plain, small = Speculator("ar", target=model), Speculator("ar", target=model, kv_dtype=kv_dtype)
    expected = [spec.generate(PROMPTS[0], max_new_tokens=8)[0].token_ids for spec in (plain, small)]
    for spec in (plain, small, plain):
        result = spec.generate(PROMPTS[0], max_new_tokens=8, cache=cache)[0]
        assert result.token_ids == expected[spec is small] and result.exact == (spec is plain)
        assert cache.store is not None and cache.store.dtype == getattr(torch, kv_dtype if spec is small else "float32")


def test_what_cannot_be_rounded_is_refused(cpu_offloads):
    with pytest.raises(ValueError, match="kv_dtype"):
        Speculator("ar", kv_dtype="int3")
    with pytest.raises(CapabilityError):
        Speculator("ar", target=tiny_model(vocab=11, dtype=torch.bfloat16), kv_dtype="int8")
    with pytest.raises(CapabilityError):
        Speculator("ar", target=tiny_model(vocab=11, dtype=torch.float32), kv_dtype="int8", offload="host")
    with pytest.raises(CapabilityError, match="several sizes"):
        Speculator("ar", target=zoo_model("deepseek_v3").float(), kv_dtype="int4")
    same = Speculator("ar", target=tiny_model(vocab=11, dtype=torch.float32), kv_dtype="float32")
    assert same.exact
