"""The hosted target computes what the model itself computes, and leaves the model as it was."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from longdraft.memory.store import KVStore
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from tests.support.forwards import forward
from tests.support.tiny import FAMILIES, tiny_model
from tests.support.tree_logits import check_tree_logits
from tests.support.tree_logits import random_tokens as tree_text

CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # float32 through three layers; logits are of the order of 5
every_family = pytest.mark.parametrize("family", FAMILIES)


def text(n: int, seed: int = 0, vocab: int = 61) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(runner: TargetRunner, store: KVStore, slot: int, tokens: list[int], chunk: int = 10**6) -> None:
    """Reads and commits a text, a chunk at a time."""
    for i in range(0, len(tokens), chunk):
        part = tokens[i : i + chunk]
        forward(runner, [part], store, [slot], logits="none")
        store.commit(slot, range(len(part)))


@torch.inference_mode()
def own(model: PreTrainedModel, tokens: list[int], **options: object):
    """The model's own forward over a whole text."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False, **options)


def own_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return own(model, tokens).logits[0].float()


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
# Family, options, tokens of two texts, attention path.
HOSTED = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, (40, 5), "cpu"),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}, (40, 5), "cpu"),
    "odd head size": ("llama", {"head_dim": 24, "heads": 3, "kv_heads": 3}, (40, 5), "cpu"),
    "yarn": ("llama", {"rope_parameters": YARN}, (40, 5), "cpu"),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}, (40, 5), "cpu"),
    "a qwen2 that does not use its window": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 8},
        (37, 5),
        "cpu",
    ),
    "no text, and one token": ("mistral", {}, (0, 1), "cpu"),
    **{f"{family} elsewhere": (family, {}, (30, 3), ("sdpa", "reference")[i % 2]) for i, family in enumerate(FAMILIES)},
}


@pytest.mark.parametrize("name", HOSTED)
def test_rows_of_trees_are_the_models_own(name, monkeypatch):
    family, over, lengths, path = HOSTED[name]
    monkeypatch.setenv("LONGDRAFT_ATTENTION", path)
    model = tiny_model(family, **over)
    runner, close = TargetRunner(model), partial(torch.allclose, **CLOSE)
    assert runner.attention_path == path
    plain = check_tree_logits(runner, close, lengths)
    whole = [*tree_text(lengths[0], lengths[0]), *tree_text(7, 3)]
    assert close(plain, own_logits(model, whole)[lengths[0] :])


@every_family
def test_taps_and_rows_are_the_models_own(family):
    """Hidden states; queries after RoPE; keys and values as in the model's own cache."""
    model, tokens = tiny_model(family), text(30)
    runner = TargetRunner(model)
    store = runner.new_store(2, 40)
    read(runner, store, 1, tokens[:20], 11)
    out = forward(runner, [tokens[20:]], store, [1], taps=Taps(hidden=(0, 2, 1), queries=(2,)))
    assert sorted(out.hidden) == [0, 1, 2] and sorted(out.queries) == [2]
    store.commit(1, range(10))
    expected = own(model, tokens, output_hidden_states=True).hidden_states
    for layer in (0, 1):
        torch.testing.assert_close(out.hidden[layer], expected[layer + 1][:, 20:], **CLOSE)
    # transformers reports the last one after the final norm; the tap is before it.
    torch.testing.assert_close(model.model.norm(out.hidden[2]), expected[3][:, 20:], **CLOSE)
    torch.testing.assert_close(model.lm_head(model.model.norm(out.hidden[2])), out.logits, **CLOSE)
    with torch.inference_mode():
        layer = model.model.layers[2]
        x = layer.input_layernorm(expected[2][:, 20:])
        q = layer.self_attn.q_proj(x).view(1, 10, 6, 16)
        q = (layer.self_attn.q_norm(q) if family == "qwen3" else q).transpose(1, 2)
        wanted, _ = apply_rotary_pos_emb(q, q, *model.model.rotary_emb(x, torch.arange(20, 30)[None]))
        cache = model(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values
    torch.testing.assert_close(out.queries[2], wanted, **CLOSE)
    for layer in range(3):
        torch.testing.assert_close(store.keys[layer, 1, :, :30], cache.layers[layer].keys[0], **CLOSE)
        torch.testing.assert_close(store.values[layer, 1, :, :30], cache.layers[layer].values[0], **CLOSE)
