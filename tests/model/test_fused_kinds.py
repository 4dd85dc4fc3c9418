"""Fused layers of models with windows, caps, norms behind the attention and layers without positions."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
    SmolLM3Config,
)

from longdraft import native
from longdraft.memory.windows import WindowStates
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from longdraft.model.whole_lm import WholeLM
from longdraft.native import DecoderLayer, DecoderStack, Rows
from tests.forwards import forward

pytestmark = pytest.mark.skipif(native.kernels() is None, reason=f"no kernels here: {native.missing()}")

WINDOW = 6
SOME = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
DEPTHS = [0, 1, 1, 2]
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# A bounded window of any size slides over texts of 40 tokens; in Gemma 2 scores and logits are capped as well.
CONFIGS = {
    "gemma": GemmaConfig(**SIZES),
    "gemma2": Gemma2Config(
        **SIZES,
        sliding_window=WINDOW,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=SOME, rope_parameters=ROPES),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen3": Qwen3Config(**SIZES, sliding_window=WINDOW, use_sliding_window=True, layer_types=SOME),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 1, 0, 1]),
    "smollm3 windows": SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0, 1, 0], layer_types=SOME, use_sliding_window=True, sliding_window=WINDOW
    ),
}


def model_of(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0.0, 0.2)
    return model.eval()


def outputs(model, fused: bool, monkeypatch):
    """Logits, taps and all rows after prompts of two lengths, a tree, a commit and more steps than a window."""
    monkeypatch.setenv("LONGDRAFT_NATIVE", "1" if fused else "0")
    runner = TargetRunner(model)
    store = runner.new_store(3, 200)
    for slot, n in ((2, 70), (0, 4)):
        forward(runner, [[(7 * i) % 61 for i in range(n)]], store, [slot], logits="none", prompt=True)
        store.commit(slot, range(n))
    full = runner.kv_shape.layers
    taps = Taps(hidden=(0, 2), queries=(0, full - 1) if full else ())
    mask, depths = TREE.expand(2, -1, -1), [DEPTHS, DEPTHS]
    tree = forward(runner, [[5, 6, 7, 8], [9, 10, 11, 12]], store, [2, 0], mask=mask, depths=depths, taps=taps)
    found = [tree.logits, *tree.hidden.values(), *tree.queries.values()]
    store.commit(2, [0, 1, 3])
    for token in range(2 * WINDOW):
        found.append(forward(runner, [[token]], store, [2]).logits)
        store.commit(2, [0])
    rows = store.lengths[2]
    for kept in (store, *store.states):
        assert not isinstance(kept, WindowStates) or kept.starts[2] == 0
        found += [kept.keys[:, 2, :, :rows], kept.values[:, 2, :, :rows]]
    return runner, found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_as_the_models_own_code(name, monkeypatch):
    model = model_of(name)
    runner, found = outputs(model, True, monkeypatch)
    assert len(runner.twin.fused.layers) == 4 and runner.twin.fused.stack is not None
    _, wanted = outputs(model, False, monkeypatch)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_alone_and_in_a_tree(name):
    """The path of the tree is decoded step by step; the window slides in between."""
    runner, tokens, path = TargetRunner(model_of(name)), [5, 6, 7, 8], [0, 1, 3]
    store = runner.new_store(2, 100)
    for slot in (0, 1):
        forward(runner, [list(range(30))], store, [slot], logits="none", prompt=True)
        store.commit(slot, range(30))
    for _ in range(4):
        tree = forward(runner, [tokens], store, [0], mask=TREE[None], depths=[DEPTHS]).logits
        store.commit(0, path)
        for node in path:
            alone = forward(runner, [[tokens[node]]], store, [1]).logits
            store.commit(1, [0])
            assert torch.equal(alone[0, 0], tree[0, node])
        tokens = tree[0].argmax(-1).tolist()


def test_bits_do_not_depend_on_when_the_rows_of_windows_were_moved():
    """One store moves them for a wide tree that is dropped again, the other later or never."""
    runner, length = TargetRunner(model_of("gemma3")), 2300
    store = runner.new_store(2, 2700)
    text = [(7 * i + i // 50) % 61 for i in range(length)]
    for slot in (0, 1):
        for first in range(0, length, 1000):
            piece = text[first : first + 1000]
            forward(runner, [piece], store, [slot], logits="none", prompt=True)
            store.commit(slot, range(len(piece)))
    forward(runner, [[1] * 300], store, [1], logits="none")
    (windows,) = store.states
    assert isinstance(windows, WindowStates) and windows.starts[0] == 0 < windows.starts[1]
    for token in range(4):
        one, other = forward(runner, [[token]] * 2, store, [0, 1]).logits
        assert torch.equal(one, other)
        for slot in (0, 1):
            store.commit(slot, [0])


def test_a_model_with_windows_drafts_for_itself_in_one_call():
    """As its forwards do, with the weights that a draft has."""
    runner = TargetRunner(model_of("gemma3"))
    whole = WholeLM.of(runner)
    assert whole is not None
    runner.twin.fused.stack = runner.twin.fused.draft_stack  # forwards with the draft's weights
    store = runner.new_store(2, 100)
    for slot in (0, 1):
        forward(runner, [list(range(30))], store, [slot], logits="none", prompt=True)
        store.commit(slot, range(30))
    wanted = forward(runner, [[5, 6, 7, 8]], store, [0], mask=TREE[None], depths=[DEPTHS]).logits
    for depth, nodes in enumerate(([0], [1, 2], [3])):
        tokens, ancestors = torch.tensor([[5 + i for i in nodes]]), TREE[None, nodes, : nodes[-1] + 1]
        found, places = whole.nodes(store, [1], tokens, [30 + depth], ancestors, 61)
        for row, node in enumerate(nodes):
            log_probs = wanted[0, node].log_softmax(-1)
            torch.testing.assert_close(found[0, row], log_probs[places[0, row]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_rows_of_other_dtypes(dtype, monkeypatch):
    """Windows of 16 bits, or of 32 beside rows of eight: close to plain rows, and to what torch computes."""
    model, found = model_of("gemma3"), []
    for fused, own in ((True, dtype), (False, dtype), (True, None)):
        monkeypatch.setenv("LONGDRAFT_NATIVE", "1" if fused else "0")
        runner = TargetRunner(model)
        store = runner.new_store(1, 60, dtype=own)
        forward(runner, [list(range(20))], store, [0], logits="none")
        store.commit(0, range(20))
        found.append(forward(runner, [[5, 6, 7, 8]], store, [0], mask=TREE[None], depths=[DEPTHS]).logits)
    ours, torchs, plain = found
    for other in (torchs, plain):
        assert (ours - other).abs().max() < 0.05 * other.abs().max()


@pytest.mark.parametrize("turned", [0, 8, 16])
def test_positions_turn_the_first_dimensions_of_a_head(turned):
    """Queries of one layer, with rotary tables for a part of each head."""
    own, g = native.kernels(), torch.Generator().manual_seed(0)
    assert own is not None
    products = [(torch.randn(*size, generator=g), None) for size in ((32, 16), (16, 16), (16, 16), (16, 32))]
    mlp = [(torch.randn(*size, generator=g), None) for size in ((24, 16), (24, 16), (16, 24))]
    norm = (torch.ones(16), 1e-6)
    layer = DecoderLayer({"norm": norm, "mlp_norm": norm}, [*products, *mlp], 2, 1, 16, 0.25)
    angles, x = torch.randn(1, 3, turned // 2, generator=g).repeat(1, 1, 2), torch.randn(1, 3, 16, generator=g)
    keys, values = torch.zeros(1, 1, 1, 3, 16), torch.zeros(1, 1, 1, 3, 16)
    rows = Rows(angles.cos(), angles.sin(), [0], [0], [3], torch.ones(1, 3, 3, dtype=torch.bool).tril())
    plain = (torch.nn.functional.rms_norm(x, [16], eps=1e-6) @ products[0][0].t()).view(1, 3, 2, 16).transpose(1, 2)
    out = own.stack(DecoderStack([layer]), rows, keys, values, x.clone(), queries=(0,))
    first, rest = plain[..., :turned], plain[..., turned:]
    half = torch.cat([-first[..., turned // 2 :], first[..., : turned // 2]], -1)
    wanted = torch.cat([first * angles.cos()[:, None] + half * angles.sin()[:, None], rest], -1)
    torch.testing.assert_close(out.queries[0], wanted, rtol=1e-5, atol=1e-5)
