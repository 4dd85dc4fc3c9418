"""Models with recurrent layers: rows equal plain rows to the bit, and what is rejected leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from longdraft import PromptCache, Request, Result, Sampling, Speculator
from longdraft.errors import UnsupportedModelError
from longdraft.memory import snapshot
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from tests.native.levels import needs_kernels
from tests.support.drafts import random_eagle3, random_heads, random_onepass
from tests.support.forwards import forward
from tests.support.recurrent_models import FAMILIES, KINDS, recurrent_model, some_prompt
from tests.support.slow_marks import rotate_pairs, slow, slow_except
from tests.support.tiny import generate_tokens, tiny_tokenizer

NEW = 24
in_bits = needs_kernels  # without them torch's products round a row by the number of rows


@cache
def runner(family: str) -> TargetRunner:
    return TargetRunner(recurrent_model(family))


def read(runner: TargetRunner, store: KVStore, prompt: list[int], slot: int = 0, chunk: int = 16) -> torch.Tensor:
    """Prefills a prompt in chunks; returns the logits of its last token."""
    while store.lengths[slot] < len(prompt):
        done = store.lengths[slot]
        tokens = prompt[done : (done // chunk + 1) * chunk]
        out = forward(runner, [tokens], store, [slot], logits="last", is_prefill=True)
        store.commit(slot, range(len(tokens)))
    return out.logits[0, -1]


def step(own: TargetRunner, store: KVStore, token: int, slot: int = 0) -> torch.Tensor:
    out = forward(own, [[token]], store, [slot])
    store.commit(slot, [0])
    return out.logits[0, 0]


def plainly(own: TargetRunner, prompt: list[int], new: int = NEW) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens by plain steps, and the logits after each of them."""
    store = own.new_store(1, len(prompt) + new)
    tokens = [int(read(own, store, prompt).argmax())]
    rows = []
    while len(tokens) < new:
        rows.append(step(own, store, tokens[-1]))
        tokens.append(int(rows[-1].argmax()))
    return tokens, rows


@in_bits
@pytest.mark.parametrize("family", slow_except(KINDS, ("qwen3_5_text", "lfm2", "mamba")))
def test_a_prefix_is_taken_up_where_a_state_was_kept(family):
    own, prompt = runner(family), some_prompt(37)
    tokens, rows = plainly(own, prompt, 8)
    cache = PromptCache()
    store = cache.open(own.new_store, 2, 80)
    cache.reuse_prefix(0, prompt)
    read(own, store, prompt)
    for token in tokens[:4]:
        step(own, store, token)
    cache.record_tokens(0, [*prompt, *tokens[:4]])
    other = [*prompt[:20], *some_prompt(10, 3)]
    # The committed end, the prompt's end, a chunk's end, and no state in between.
    assert cache.reuse_prefix(1, [*prompt, *tokens[:5]]) == 41
    assert torch.equal(step(own, store, tokens[4], 1), rows[4])
    assert cache.reuse_prefix(1, [*prompt, 1, 2]) in (37, 41 - 4)
    assert torch.equal(step(own, store, tokens[0], 1), rows[0])
    assert cache.reuse_prefix(1, other) == 16
    read(own, store, other, 1)
    alone = plainly(own, other, 3)
    assert torch.equal(step(own, store, alone[0][0], 1), alone[1][0])
    # A larger store takes the states over.
    store = cache.open(own.new_store, 3, 200)
    assert cache.reuse_prefix(2, [*prompt, *tokens[:5]]) == 41
    assert torch.equal(step(own, store, tokens[4], 2), rows[4])


@in_bits
@pytest.mark.parametrize("family", slow_except(KINDS, ("qwen3_5_text", "lfm2", "mamba")))
def test_a_snapshot_holds_the_states(family, tmp_path):
    own, prompt = runner(family), some_prompt(37)
    tokens, rows = plainly(own, prompt, 8)
    store = own.new_store(1, 80)
    read(own, store, prompt)
    step(own, store, tokens[0])
    snapshot.save(store, 0, [*prompt, tokens[0]], own.fingerprint, tmp_path / "text")
    restored = own.new_store(2, 80)
    assert snapshot.load(restored, 1, own.fingerprint, tmp_path / "text") == [*prompt, tokens[0]]
    assert torch.equal(step(own, restored, tokens[1], 1), rows[1])
    # As much of a beginning as there is a state for.
    assert snapshot.load(restored, 0, own.fingerprint, tmp_path / "text", max_tokens=35) == prompt[:32]
    read(own, restored, prompt)
    assert torch.equal(step(own, restored, tokens[0]), rows[0])


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
@pytest.mark.parametrize("kind", ["eagle3", "onepass", "heads", "small-lm"])
def test_trained_drafts_draft_for_it(kind, tmp_path):
    model = recurrent_model()
    drafts = {
        "eagle3": lambda: random_eagle3(tmp_path, model, layers=(0, 1, 3)),
        "onepass": lambda: random_onepass(tmp_path, model, layers=(0, 1, 3), head_dim=16),
        "heads": lambda: random_heads(tmp_path, model),
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


@pytest.mark.parametrize("family", slow_except(FAMILIES, ("qwen3_5_text", "lfm2", "mamba")))
def test_a_whole_run_is_the_models_own_generate(family):
    model = recurrent_model(family)
    spec = Speculator("prompt-lookup", target=model, plan="fixed", branches=2, min_n=1)
    for prompt in PROMPTS:
        assert spec.generate([prompt], max_new_tokens=NEW)[0].token_ids == generate_tokens(model, prompt, NEW)


@pytest.mark.parametrize("family", ["qwen3_5_text", slow("falcon_h1")])
def test_a_long_prompt_is_prefilled_chunk_by_chunk(family):
    model, prompt = recurrent_model(family), some_prompt(2600)
    spec = Speculator("prompt-lookup", target=model, plan="fixed", branches=2, min_n=1)
    cache = PromptCache()
    expected = generate_tokens(model, prompt, 12)
    assert spec.generate([prompt], max_new_tokens=12, cache=cache)[0].token_ids == expected
    (again,) = spec.generate([[*prompt[:2500], 7, 8, 9]], max_new_tokens=12, cache=cache)
    assert again.token_ids == generate_tokens(model, [*prompt[:2500], 7, 8, 9], 12)
    assert cache.store is not None
    assert cache.store.restorable_length(0, 2100) == 2048


def test_what_cannot_be_exact_is_refused():
    model = recurrent_model()
    with pytest.raises(UnsupportedModelError, match="SpecPV"):
        Speculator("specpv", target=model, drafter="prompt-lookup").generate([PROMPTS[0]], max_new_tokens=4)
