"""The hosted target computes what the model itself computes, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from longdraft.memory.store import KVStore
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from longdraft.trees.builders import union
from longdraft.trees.masks import padded_mask
from longdraft.trees.tree import TokenTree
from tests.forwards import forward
from tests.quick import in_turn
from tests.tiny import FAMILIES, tiny_model

CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # float32 through three layers; logits are of the order of 5
GQA = [(4, 4), (6, 2), (4, 1), (8, 1)]
every_family = pytest.mark.parametrize("family", FAMILIES)


def text(n: int, seed: int = 0, vocab: int = 61) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(runner: TargetRunner, store: KVStore, slot: int, tokens: list[int], chunk: int = 10**6) -> None:
    """Reads and commits a text, a chunk at a time."""
    for i in range(0, len(tokens), chunk):
        part = tokens[i : i + chunk]
        forward(runner, [part], store, [slot], logits="none")
        store.commit(slot, range(len(part)))


def hosted(model: PreTrainedModel, tokens: list[int], chunk: int = 10**6) -> tuple[TargetRunner, KVStore]:
    """A runner, and a store whose only slot holds a text and has room for 60 tokens more."""
    runner = TargetRunner(model)
    store = runner.new_store(1, len(tokens) + 60)
    read(runner, store, 0, tokens, chunk)
    return runner, store


@torch.inference_mode()
def own(model: PreTrainedModel, tokens: list[int], **options: object):
    """The model's own forward over a whole text."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False, **options)


def own_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return own(model, tokens).logits[0].float()


def random_tree(size: int, seed: int, root: int) -> TokenTree:
    g = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(i, (), generator=g)) for i in range(1, size)]
    return TokenTree((root, *text(size - 1, seed)), tuple(parents))


def verify(runner: TargetRunner, store: KVStore, slots: list[int], trees: list[TokenTree]) -> torch.Tensor:
    """Logits of every node of every tree, in one forward."""
    size = max(tree.size for tree in trees)
    tokens = [tree.tokens + (0,) * (size - tree.size) for tree in trees]
    depths = [tree.depths + (0,) * (size - tree.size) for tree in trees]
    out = forward(runner, tokens, store, slots, depths=depths, mask=padded_mask(trees, size))
    assert out.logits is not None
    return out.logits


def assert_nodes_are_right(model: PreTrainedModel, prefix: list[int], tree: TokenTree, logits: torch.Tensor):
    """Each node's logits are those of the model's own forward over prefix and path."""
    for node in range(tree.size):
        path = [tree.tokens[i] for i in tree.path(node)]
        torch.testing.assert_close(logits[node], own_logits(model, prefix + path)[-1], **CLOSE)


def assert_a_tree_is_right(model: PreTrainedModel, prefix: list[int], size: int = 8) -> None:
    """A hosted forward over a random tree behind a prefix gives the model's own logits."""
    runner, store = hosted(model, prefix, 16)
    tree = random_tree(size, seed=len(prefix), root=5)
    assert_nodes_are_right(model, prefix, tree, verify(runner, store, [0], [tree])[0])


@pytest.mark.parametrize(("family", "heads"), in_turn(FAMILIES, GQA, each=2))
def test_prefill_by_chunks_and_then_blocks_give_the_models_own_logits(family, heads):
    tie, (heads, kv_heads) = heads[1] == 1, heads
    model = tiny_model(family, heads=heads, kv_heads=kv_heads, tie=tie)
    runner = TargetRunner(model)
    tokens = text(100)
    store = runner.new_store(1, 100)
    rows = []
    for start, end in ((0, 70), (70, 83), (83, 84), (84, 92), (92, 100)):
        out = forward(runner, [tokens[start:end]], store, [0])
        store.commit(0, range(end - start))
        rows.append(out.logits[0])
    torch.testing.assert_close(torch.cat(rows), own_logits(model, tokens), **CLOSE)


@every_family
def test_float64_agrees_to_nine_digits(family, monkeypatch):
    # Through the path that keeps the model's precision; logits come back in float32, hidden states as they are.
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "sdpa")
    model = tiny_model(family, dtype=torch.float64)
    tokens = text(60)
    runner, store = hosted(model, tokens[:50], 20)
    out = forward(runner, [tokens[50:]], store, [0], taps=Taps(hidden=(0, 1)))
    expected = own(model, tokens, output_hidden_states=True)
    for layer in (0, 1):
        hidden = expected.hidden_states[layer + 1][:, 50:]
        torch.testing.assert_close(out.hidden[layer], hidden, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(out.logits[0], expected.logits[0, 50:].float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("family", "path"), in_turn(FAMILIES, ["cpu", "sdpa", "reference"]))
def test_every_attention_path_hosts_every_family(family, path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_ATTENTION", path)
    model = tiny_model(family)
    assert TargetRunner(model).attention_path == path
    assert_a_tree_is_right(model, text(30), 6)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "over"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"head_dim": 24, "heads": 3, "kv_heads": 3}),
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": LLAMA3}),
    ],
    ids=["llama with biases", "qwen3 with biases", "odd head size", "yarn", "llama3 rope"],
)
def test_options_of_a_family_are_hosted(family, over):
    assert_a_tree_is_right(tiny_model(family, **over), text(40))


def test_bfloat16_agrees_within_its_rounding():
    model, tokens = tiny_model(dtype=torch.bfloat16), text(60)
    runner, store = hosted(model, tokens[:50])
    got = forward(runner, [tokens[50:]], store, [0]).logits[0]
    # The yardstick: how far the model itself moves when its weights and its arithmetic are rounded so.
    spread = own_logits(model, tokens)[50:] - own_logits(tiny_model(), tokens)[50:]
    assert (got - own_logits(model, tokens)[50:]).pow(2).mean() < 2 * spread.pow(2).mean()


@pytest.mark.parametrize("start", [0, 7])
def test_last_gives_the_last_rows_logits_and_none_gives_none(start):
    tokens = text(20)
    runner, store = hosted(tiny_model(), tokens[:start])
    every, last, none = (
        forward(runner, [tokens[start:]], store, [0], logits=which).logits for which in ("all", "last", "none")
    )
    assert last.shape == (1, 1, 61) and none is None
    torch.testing.assert_close(last[:, 0], every[:, -1], **CLOSE)


def test_a_block_that_is_not_committed_leaves_no_trace():
    model, tokens = tiny_model(), text(30)
    runner, store = hosted(model, tokens[:20])
    forward(runner, [text(12, seed=9)], store, [0])
    assert store.lengths == [20]
    got = forward(runner, [tokens[20:]], store, [0]).logits[0]
    torch.testing.assert_close(got, own_logits(model, tokens)[20:], **CLOSE)


@pytest.mark.parametrize("path", ["reference", "cpu", "sdpa"])
def test_a_tree_fed_level_by_level_is_the_tree_fed_at_once(path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_ATTENTION", path)
    runner = TargetRunner(tiny_model())
    texts = [text(30), text(17, seed=1)]
    # Levels of 1, 3, 4 and 2 nodes; parents as places in the tree.
    parents = [(-1, 0, 0, 0, 1, 1, 3, 3, 7, 4), (-1, 0, 0, 0, 2, 2, 2, 1, 5, 6)]
    trees = [TokenTree(tuple(text(10, seed=5 + i)), p) for i, p in enumerate(parents)]
    stores = [runner.new_store(2, 60, feature_layers=(0, 2)) for _ in "ab"]
    for store in stores:
        for slot, tokens in enumerate(texts):
            read(runner, store, slot, tokens)
    whole = verify(runner, stores[0], [1, 0], trees)
    mask, rows, start = padded_mask(trees, 10), [], 0
    for size in (1, 3, 4, 2):
        own = slice(start, start + size)
        tokens = torch.tensor([tree.tokens[own] for tree in trees])
        depths = [tree.depths[own] for tree in trees]
        out = forward(runner, tokens, stores[1], [1, 0], depths=depths, mask=mask[:, own, : own.stop], offset=start)
        rows.append(out.logits)
        start = own.stop
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, **CLOSE)
    for store in stores:  # and any path of it can be committed
        store.commit(1, trees[0].path(8))
        store.commit(0, trees[1].path(9))
    for slot, n in enumerate(stores[0].lengths):
        for name in ("keys", "values"):
            a, b = (getattr(store, name)[:, slot, :, :n] for store in stores)
            torch.testing.assert_close(a, b, **CLOSE)
        torch.testing.assert_close(*(store.features[slot, :n] for store in stores), **CLOSE)


def test_a_chain_goes_on_behind_rows_that_are_not_committed():
    model, tokens = tiny_model(), text(30)
    runner, store = hosted(model, tokens[:20])
    forward(runner, [tokens[20:24]], store, [0], logits="none")
    got = forward(runner, [tokens[24:]], store, [0], offset=4).logits[0]
    torch.testing.assert_close(got, own_logits(model, tokens)[24:], **CLOSE)
    store.commit(0, range(10))
    assert store.lengths == [30]


@pytest.mark.parametrize(("size", "offset"), [(61, 0), (2, 59)])
def test_a_block_that_does_not_fit_the_store_is_refused_before_it_is_computed(size, offset):
    runner, store = hosted(tiny_model(), text(6))
    with pytest.raises(ValueError, match="61 more exceed the capacity 66"):
        forward(runner, [[1] * size], store, [0], offset=offset)


@pytest.mark.parametrize(("family", "prefix_length"), in_turn(FAMILIES, [37, 0, 1]))
def test_one_forward_verifies_every_node_of_a_random_tree(family, prefix_length):
    assert_a_tree_is_right(tiny_model(family), text(prefix_length), 14)


@every_family
def test_after_a_path_is_committed_the_next_trees_are_right_too(family):
    model, prefix = tiny_model(family), text(20)
    runner, store = hosted(model, prefix)
    for seed in range(4):
        tree = random_tree(10, seed, root=seed)
        assert_nodes_are_right(model, prefix, tree, verify(runner, store, [0], [tree])[0])
        path = tree.path(max(range(tree.size), key=lambda node: (tree.depths[node], node)))
        assert len(path) > 2 and path != list(range(len(path)))
        store.commit(0, path)
        prefix = prefix + [tree.tokens[node] for node in path]


@every_family
def test_a_ragged_batch_in_shuffled_slots_equals_one_by_one(family):
    model = tiny_model(family)
    runner = TargetRunner(model)
    prefixes = [text(33), [], text(5, seed=1)]
    trees = [random_tree(9, 1, root=1), union(2, [[3, 4], [3, 5]]), random_tree(1, 1, root=7)]
    slots = [3, 0, 2]
    store = runner.new_store(4, 60)
    for slot, prefix in zip(slots, prefixes, strict=True):
        read(runner, store, slot, prefix)
    logits = verify(runner, store, slots, trees)
    for b, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
        alone = verify(*hosted(model, prefix), [0], [tree])[0]
        torch.testing.assert_close(logits[b, : tree.size], alone, **CLOSE)
        assert_nodes_are_right(model, prefix, tree, logits[b])


@every_family
def test_hidden_taps_are_the_models_hidden_states(family):
    model, tokens = tiny_model(family), text(30)
    runner, store = hosted(model, tokens[:20])
    out = forward(runner, [tokens[20:]], store, [0], taps=Taps(hidden=(0, 2, 1)))
    expected = own(model, tokens, output_hidden_states=True)
    assert sorted(out.hidden) == [0, 1, 2]
    for layer in (0, 1):
        torch.testing.assert_close(out.hidden[layer], expected.hidden_states[layer + 1][:, 20:], **CLOSE)
    # transformers reports the last one after the final norm; the tap is before it.
    torch.testing.assert_close(model.model.norm(out.hidden[2]), expected.hidden_states[3][:, 20:], **CLOSE)
    torch.testing.assert_close(model.lm_head(model.model.norm(out.hidden[2])), out.logits, **CLOSE)


@every_family
def test_query_taps_are_the_queries_after_rope(family):
    model, tokens = tiny_model(family), text(30)
    runner, store = hosted(model, tokens[:20])
    out = forward(runner, [tokens[20:]], store, [0], taps=Taps(queries=(2,)))
    assert sorted(out.queries) == [2] and out.hidden == {}
    with torch.inference_mode():
        layer = model.model.layers[2]
        x = layer.input_layernorm(own(model, tokens, output_hidden_states=True).hidden_states[2][:, 20:])
        q = layer.self_attn.q_proj(x).view(1, 10, 6, 16)
        if family == "qwen3":
            q = layer.self_attn.q_norm(q)
        q = q.transpose(1, 2)
        cos, sin = model.model.rotary_emb(x, torch.arange(20, 30)[None])
        expected, _ = apply_rotary_pos_emb(q, q, cos, sin)
    torch.testing.assert_close(out.queries[2], expected, **CLOSE)


@every_family
def test_the_store_holds_what_the_models_own_cache_would(family):
    model, tokens = tiny_model(family), text(30)
    runner = TargetRunner(model)
    store = runner.new_store(2, 40)
    read(runner, store, 1, tokens, 11)
    with torch.inference_mode():
        cache = model(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values
    for layer in range(3):
        torch.testing.assert_close(store.keys[layer, 1, :, :30], cache.layers[layer].keys[0], **CLOSE)
        torch.testing.assert_close(store.values[layer, 1, :, :30], cache.layers[layer].values[0], **CLOSE)


def test_taps_work_without_logits():
    runner = TargetRunner(tiny_model())
    out = forward(runner, [[1, 2, 3]], runner.new_store(1, 8), [0], logits="none", taps=Taps((1,), (0,)))
    assert out.logits is None and out.hidden[1].shape == (1, 3, 48) and out.queries[0].shape == (1, 6, 3, 16)


def test_the_runner_knows_its_models_shape():
    runner = TargetRunner(tiny_model(context=300))
    shape = runner.kv_shape
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype) == (3, 2, 16, torch.float32)
    assert (runner.vocab_size, runner.context_length) == (61, 300)


@pytest.mark.parametrize(("ids", "expected"), [(None, set()), (7, {7}), ([7, 9], {7, 9})])
def test_the_end_of_sequence_ids_are_those_of_the_generation_config(ids, expected):
    model = tiny_model()
    model.generation_config.eos_token_id = ids
    assert TargetRunner(model).eos_token_ids == expected


def test_the_fingerprint_names_the_weights_and_the_configuration():
    known = TargetRunner(tiny_model()).fingerprint
    assert known == TargetRunner(tiny_model()).fingerprint
    others = [
        tiny_model(seed=1),
        tiny_model(dtype=torch.bfloat16),
        tiny_model("qwen3"),
        tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    ]
    assert len({known, *(TargetRunner(m).fingerprint for m in others)}) == 5


def test_two_targets_do_not_disturb_each_other():
    one, two = tiny_model(seed=1), tiny_model("qwen3", seed=2)
    for model in (one, two, one):
        runner = TargetRunner(model)
        got = forward(runner, [text(9)], runner.new_store(1, 9), [0]).logits[0]
        torch.testing.assert_close(got, own_logits(model, text(9)), **CLOSE)
