"""Layers that see the last rows only: the same text as the model's own, rows that forget, states that go back."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

from longdraft.errors import UnsupportedModelError
from longdraft.memory import snapshot
from longdraft.memory.prompt_cache import PromptCache
from longdraft.memory.windows import Span, WindowShape, WindowStates
from longdraft.model.runner import TargetRunner
from longdraft.speculator import Speculator
from tests.drafts import random_draft, random_eagle3
from tests.quick import in_turn

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip


def drawn(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            std = 0.4 if weight.dim() > 1 else 0.1
            weight.copy_(std * torch.randn(weight.shape, generator=generator))
    return model.eval()


def gemma(window=24):
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**SIZES, sliding_window=window, layer_types=kinds, query_pre_attn_scalar=16)
    return drawn(Gemma3ForCausalLM(config))


def mistral(window=24):
    return drawn(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)))


def llama4(chunk=24):
    kinds = ["chunked_attention", "full_attention"] * 2
    return drawn(
        Llama4ForCausalLM(
            Llama4TextConfig(
                **SIZES, layer_types=kinds, attention_chunk_size=chunk, intermediate_size_mlp=96, num_local_experts=2,
                moe_layers=[], attn_temperature_tuning=False,
            )
        )
    )  # fmt: skip


def text(length, seed=0):
    return torch.randint(2, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def own(model, prompt, new):
    with torch.inference_mode():
        return model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("made", "method"), in_turn([gemma, mistral, llama4], ["self", "ar", "prompt-lookup"], both=[gemma])
)
def test_a_model_with_windows_writes_its_own_text(made, method):
    model = made()
    prompts = [text(90), text(20, 1), text(3, 2)]
    results = Speculator(method, target=model).generate(prompts, max_new_tokens=30)
    assert [r.token_ids for r in results] == [own(model, prompt, 30) for prompt in prompts]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("self", {"budget": 256}),
        ("self", {"budget": 256, "view": "snapkv"}),
        ("quantspec", {}),
        ("magicdec", {}),
        ("specpv-exact", {"budget": 256}),
        ("longspec", {"draft": random_draft}),
        ("eagle3", {"draft": partial(random_eagle3, layers=(0, 1, 2))}),
    ],
)
def test_drafts_on_parts_of_the_kv_write_the_models_own_text(method, options, tmp_path):
    model, prompts = gemma(), [text(1500), text(300, 2)]
    if "draft" in options:
        options = {"draft": options["draft"](tmp_path / "draft", model)}
    spec = Speculator(method, target=model, plan="fixed", **options)
    results = spec.generate(prompts, max_new_tokens=24)
    assert [r.token_ids for r in results] == [own(model, prompt, 24) for prompt in prompts]
    assert "draft" in options or all(r.mean_accepted_length > 1 for r in results)


@pytest.mark.parametrize(("method", "options"), [("specpv", {}), ("longspec", {"draft": random_draft})])
def test_methods_that_need_a_full_layer_say_so(method, options, tmp_path):
    model = mistral()
    if "draft" in options:
        options = {"draft": options["draft"](tmp_path / "draft", model)}
    with pytest.raises(UnsupportedModelError):
        Speculator(method, target=model, **options).generate([text(9)], max_new_tokens=2)


@pytest.mark.parametrize("made", [gemma, mistral, llama4])
def test_a_row_of_a_tree_has_the_bits_of_plain_decoding(made):
    runner = TargetRunner(made())
    prompt, path = text(70), text(12, 3)

    def read():
        store = runner.new_store(1, 160)
        runner.forward(store.block([0], [prompt], prompt=True), store, logits="none")
        store.commit(0, range(len(prompt)))
        return store

    store, plain = read(), []
    for token in path:
        plain.append(runner.forward(store.block([0], [[token]]), store).logits[0, 0])
        store.commit(0, [0])
    # The path is every other row; the rows between are siblings that it does not see.
    size = 2 * len(path)
    mask = torch.zeros(1, size, size, dtype=torch.bool)
    for i in range(size):
        mask[0, i, i] = True
        mask[0, i, : i if i % 2 == 0 else max(0, i - 1) : 2] = True
    tokens = [token for each in path for token in (each, (each + 1) % 97)]
    depths = [i // 2 for i in range(size)]
    store = read()
    rows = runner.forward(store.block([0], [tokens], depths=[depths], mask=mask), store).logits[0]
    assert torch.equal(rows[::2], torch.stack(plain))
    # What was accepted is moved into place, and decoding goes on from there.
    store.commit(0, range(0, size, 2))
    after = runner.forward(store.block([0], [[5]]), store).logits
    store = read()
    for token in path:
        runner.forward(store.block([0], [[token]]), store)
        store.commit(0, [0])
    assert torch.equal(after, runner.forward(store.block([0], [[5]]), store).logits)


def test_the_rows_of_a_window_do_not_grow_with_the_text():
    runner = TargetRunner(gemma())
    (short,), (long,) = (runner.new_store(1, n).states for n in (4096, 8192))
    assert short.bytes_per_slot == long.bytes_per_slot


def test_a_text_longer_than_the_buffer_is_the_models_own():
    model = gemma()
    runner = TargetRunner(model)
    prompt = text(4000)
    (result,) = Speculator("prompt-lookup", target=model).generate([prompt], max_new_tokens=24)
    assert runner.new_store(1, 8192).states[0].rows < len(prompt)
    assert result.token_ids == own(model, prompt, 24)


def test_a_prompt_cache_goes_back_as_far_as_windows_hold():
    model = gemma()
    spec = Speculator("prompt-lookup", target=model)
    cache = PromptCache()
    first = text(4000)
    spec.generate([first], max_new_tokens=4, cache=cache)
    for prompt in (first + text(9, 5), first[:3990] + text(30, 6), first[:1500] + text(40, 7)):
        (again,) = spec.generate([prompt], max_new_tokens=12, cache=cache)
        assert again.token_ids == own(model, prompt, 12)


def test_a_snapshot_restores_windows(tmp_path):
    runner = TargetRunner(gemma())
    tokens = text(100)
    stores = [runner.new_store(1, 200) for _ in range(2)]
    runner.forward(stores[0].block([0], [tokens], prompt=True), stores[0], logits="none")
    stores[0].commit(0, range(100))
    snapshot.save(stores[0], 0, tokens, runner.fingerprint, tmp_path / "kv")
    assert snapshot.load(stores[1], 0, runner.fingerprint, tmp_path / "kv") == tokens
    one, other = (runner.forward(s.block([0], [[3, 4]]), s).logits for s in stores)
    assert torch.equal(one, other)


@pytest.mark.parametrize("span", [Span(5), Span(5, chunked=True), Span(600), Span(1)])
def test_the_first_row_that_is_seen(span):
    rows = range(1400)
    seen = [
        min(r for r in range(row + 1) if (r // span.size == row // span.size if span.chunked else row - r < span.size))
        for row in (0, 4, 5, 700, 1399)
    ]
    assert [span.first(row) for row in (0, 4, 5, 700, 1399)] == seen
    assert span.firsts(torch.tensor(list(rows))).tolist() == [span.first(row) for row in rows]


def test_rows_that_do_not_fit_behind_a_window_are_refused():
    states = WindowStates(WindowShape(Span(4), 1, 1, 16, torch.float32), 1, 100_000)
    with pytest.raises(ValueError, match="window"):
        states.prepare([0], [5000], 4000)
