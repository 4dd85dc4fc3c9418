"""Models with recurrent layers: rows equal plain rows to the bit, and what is rejected leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from longdraft import Request, Result, Sampling, Speculator
from longdraft.errors import UnsupportedModelError
from longdraft.memory import snapshot
from longdraft.memory.prompt_cache import PromptCache
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.native import kernels
from tests.drafts import random_eagle3, random_heads, random_onepass
from tests.quick import in_turn
from tests.recurrent_models import FAMILIES, KINDS, VOCABULARY, generated, recurrent_model, some_prompt
from tests.tiny import tiny_tokenizer

NEW = 24
# Without our kernels, torch's products round a row by the number of rows.
in_bits = pytest.mark.skipif(kernels() is None, reason="rows have the same bits with our kernels only")

# A tree of five: a root with two children, the second of which has two.
PARENTS, DEPTHS = [-1, 0, 0, 2, 2], [0, 1, 1, 2, 2]
ROWS = [0, 2, 4]  # of the nodes that hold the right tokens


@cache
def runner(family: str) -> TargetRunner:
    return TargetRunner(recurrent_model(family))


def mask() -> torch.Tensor:
    seen = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen[None]


def read(own: TargetRunner, store: KVStore, prompt: list[int], slot: int = 0, piece: int = 16) -> torch.Tensor:
    """Reads a prompt in pieces; returns the logits of its last row."""
    while store.lengths[slot] < len(prompt):
        done = store.lengths[slot]
        tokens = prompt[done : (done // piece + 1) * piece]
        out = own.forward(store.block([slot], [tokens], prompt=True), store, logits="last")
        store.commit(slot, range(len(tokens)))
    assert out.logits is not None
    return out.logits[0, -1]


def step(own: TargetRunner, store: KVStore, token: int, slot: int = 0) -> torch.Tensor:
    out = own.forward(store.block([slot], [[token]]), store)
    store.commit(slot, [0])
    assert out.logits is not None
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


def verify_tree(own: TargetRunner, store: KVStore, tokens: list[int], slot: int = 0) -> torch.Tensor:
    """Logits (5, vocabulary) of a tree whose right nodes hold three tokens."""
    wrong = (tokens[1] + 1) % VOCABULARY, (tokens[2] + 1) % VOCABULARY
    nodes = [tokens[0], wrong[0], tokens[1], wrong[1], tokens[2]]
    out = own.forward(store.block([slot], [nodes], depths=[DEPTHS], mask=mask()), store)
    assert out.logits is not None
    return out.logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_models_own(family):
    prompt = some_prompt(37)
    model = recurrent_model(family)
    assert plainly(TargetRunner(model), prompt)[0] == generated(model, prompt, NEW)


@in_bits
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_trees_and_chains_are_plain_rows_and_rejected_ones_leave_no_trace(family):
    own, prompt = runner(family), some_prompt(37)
    tokens, rows = plainly(own, prompt)
    store = own.new_store(1, len(prompt) + NEW + 8)
    read(own, store, prompt)
    done, path = 0, ROWS
    while done + 5 < NEW:
        logits = verify_tree(own, store, tokens[done : done + 3])
        assert all(torch.equal(logits[row], rows[done + i]) for i, row in enumerate(ROWS))
        path = path[:-1] if len(path) > 1 else ROWS  # accepts three nodes, then two, then one
        store.commit(0, path)
        done += len(path)
        chain = [*tokens[done : done + 2], (tokens[done + 2] + 1) % VOCABULARY]
        out = own.forward(store.block([0], [chain]), store)
        assert torch.equal(out.logits[0, 0], rows[done])
        assert torch.equal(out.logits[0, 1], rows[done + 1])
        store.commit(0, [0])
        done += 1
        assert torch.equal(own.forward(store.block([0], [[tokens[done]]]), store).logits[0, 0], rows[done])


@in_bits
@pytest.mark.parametrize("family", KINDS)
def test_a_tree_by_levels_is_the_tree_at_once(family):
    own, prompt = runner(family), some_prompt(21)
    tokens, rows = plainly(own, prompt, 6)
    store = own.new_store(1, 40)
    read(own, store, prompt)
    seen = mask()
    nodes = [tokens[0], 7, tokens[1], 9, tokens[2]]
    parts = []
    for start, end in ((0, 1), (1, 3), (3, 5)):
        block = store.block(
            [0], [nodes[start:end]], depths=[DEPTHS[start:end]], mask=seen[:, start:end, :end], offset=start
        )
        parts.append(own.forward(block, store).logits[0])
    logits = torch.cat(parts)
    assert all(torch.equal(logits[row], rows[i]) for i, row in enumerate(ROWS))
    store.commit(0, ROWS)
    assert torch.equal(step(own, store, tokens[3]), rows[3])


@in_bits
@pytest.mark.parametrize("family", KINDS)
def test_a_ragged_batch_is_one_by_one(family):
    own, prompts = runner(family), [some_prompt(n, n) for n in (5, 33, 18)]
    texts = [plainly(own, prompt, 12) for prompt in prompts]
    store = own.new_store(3, 60)
    for slot, prompt in enumerate(prompts):
        read(own, store, prompt, slot)
    done = [0, 0, 0]
    sizes = (3, 1, 2)
    for _ in range(3):
        chains = [texts[b][0][done[b] : done[b] + sizes[b]] for b in range(3)]
        logits = own.forward(store.block([2, 0, 1], [chains[2], chains[0], chains[1]]), store).logits
        for row, b in enumerate((2, 0, 1)):
            for i in range(sizes[b]):
                assert torch.equal(logits[row, i], texts[b][1][done[b] + i])
            store.commit(b, range(sizes[b]))
            done[b] += sizes[b]


@in_bits
@pytest.mark.parametrize("family", KINDS)
def test_a_prefix_is_taken_up_where_a_state_was_kept(family):
    own, prompt = runner(family), some_prompt(37)
    tokens, rows = plainly(own, prompt, 8)
    cache = PromptCache()
    store = cache.open(own.new_store, 2, 80)
    cache.begin(0, prompt)
    read(own, store, prompt)
    for token in tokens[:4]:
        step(own, store, token)
    cache.remember(0, [*prompt, *tokens[:4]])
    other = [*prompt[:20], *some_prompt(10, 3)]
    # The committed end, the prompt's end, a piece's end, and no state in between.
    assert cache.begin(1, [*prompt, *tokens[:5]]) == 41
    assert torch.equal(step(own, store, tokens[4], 1), rows[4])
    assert cache.begin(1, [*prompt, 1, 2]) in (37, 41 - 4)
    assert torch.equal(step(own, store, tokens[0], 1), rows[0])
    assert cache.begin(1, other) == 16
    read(own, store, other, 1)
    alone = plainly(own, other, 3)
    assert torch.equal(step(own, store, alone[0][0], 1), alone[1][0])
    # A larger store takes the states over.
    store = cache.open(own.new_store, 3, 200)
    assert cache.begin(2, [*prompt, *tokens[:5]]) == 41
    assert torch.equal(step(own, store, tokens[4], 2), rows[4])


@in_bits
@pytest.mark.parametrize("family", KINDS)
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
    assert snapshot.load(restored, 0, own.fingerprint, tmp_path / "text", most=35) == prompt[:32]
    read(own, restored, prompt)
    assert torch.equal(step(own, restored, tokens[0]), rows[0])


def test_a_slot_goes_back_only_where_it_can():
    own, prompt = runner("qwen3_5_text"), some_prompt(37)
    store = own.new_store(1, 80)
    read(own, store, prompt)
    assert [store.restorable(0, n) for n in (40, 37, 36, 17, 15)] == [37, 37, 32, 16, 0]
    with pytest.raises(ValueError, match="cannot go back"):
        store.truncate(0, 20)
    out = own.forward(store.block([0], [prompt[:4]], prompt=True), store)
    assert out.logits is not None
    with pytest.raises(ValueError, match="kept whole"):
        store.commit(0, [0, 1])
    with pytest.raises(ValueError, match="was not computed"):
        store.commit(0, [0, 7])


# --- end to end ---

METHODS: dict[str, dict[str, Any]] = {
    "prompt-lookup": {"branches": 3, "min_n": 1},
    "suffix": {},
    "self": {"view": "streaming", "budget": 12, "sink": 2, "window": 2},
    "magicdec": {"view": "snapkv", "budget": 24, "window": 4},
}
PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], some_prompt(130), [8]]


@in_bits
@pytest.mark.parametrize(("method", "family"), in_turn(METHODS, ["qwen3_5_text", "lfm2", "falcon_h1"]))
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


@pytest.mark.parametrize("family", KINDS)
def test_a_whole_run_is_the_models_own_generate(family):
    model = recurrent_model(family)
    spec = Speculator("prompt-lookup", target=model, plan="fixed", branches=2, min_n=1)
    for prompt in PROMPTS:
        assert spec.generate([prompt], max_new_tokens=NEW)[0].token_ids == generated(model, prompt, NEW)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_a_long_prompt_is_read_piece_by_piece(family):
    model, prompt = recurrent_model(family), some_prompt(2600)
    spec = Speculator("prompt-lookup", target=model, plan="fixed", branches=2, min_n=1)
    cache = PromptCache()
    own = generated(model, prompt, 12)
    assert spec.generate([prompt], max_new_tokens=12, cache=cache)[0].token_ids == own
    (again,) = spec.generate([[*prompt[:2500], 7, 8, 9]], max_new_tokens=12, cache=cache)
    assert again.token_ids == generated(model, [*prompt[:2500], 7, 8, 9], 12)
    assert cache.store is not None
    assert cache.store.restorable(0, 2100) == 2048


@in_bits
def test_an_aborted_text_leaves_nothing_in_its_slot():
    model = recurrent_model()
    spec = Speculator("prompt-lookup", target=model, plan="fixed", branches=2, min_n=1)
    cache = PromptCache()
    stream = spec.stream([PROMPTS[0]], max_new_tokens=NEW, cache=cache)
    for _ in zip(range(4), stream, strict=False):
        pass
    stream.close()
    for prompt in (PROMPTS[2], PROMPTS[0]):
        again = spec.generate([prompt], max_new_tokens=NEW, cache=cache)[0].token_ids
        assert again == Speculator("ar", target=model).generate([prompt], max_new_tokens=NEW)[0].token_ids


def test_what_cannot_be_exact_is_refused():
    model = recurrent_model()
    with pytest.raises(UnsupportedModelError, match="SpecPV"):
        Speculator("specpv-exact", target=model, drafter="prompt-lookup").generate([PROMPTS[0]], max_new_tokens=4)
    with pytest.raises(UnsupportedModelError, match="nested"):
        Speculator("nested", target=model, drafter="prompt-lookup").generate([PROMPTS[0]], max_new_tokens=4)
