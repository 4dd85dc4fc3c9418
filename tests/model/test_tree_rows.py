"""Models of every kind: a row of a tree has the bits of a plain step, whoever is beside it, goes on with them, and is
what the model itself computes.

Trees of any shape, threads and instruction sets are tried in tests/exact/test_bits.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from longdraft import Speculator, load
from longdraft.model.layers.experts import store_half_experts
from longdraft.model.outputs import Taps
from longdraft.model.quant.stored_model import store_half_weights
from longdraft.model.runner import TargetRunner
from tests.native.levels import needs_kernels
from tests.support.forwards import forward
from tests.support.gguf_architectures import write
from tests.support.recurrent_models import FAMILIES as RECURRENT
from tests.support.recurrent_models import KINDS, recurrent_model
from tests.support.slow_marks import slow_except
from tests.support.tiny import FAMILIES, Family, tiny_model
from tests.support.tree_logits import check_tree_logits, prefill, random_tokens
from tests.zoo.tiny_models import tiny_config
from tests.zoo.tiny_models import tiny_model as zoo_model

CLOSE = {"rtol": 1e-3, "atol": 1e-3}
LENGTHS = (70, 5)
EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "glm4_moe", "granitemoe"),
    *("nemotron_h", "phimoe", "deepseek_v2", "deepseek_v3"),
    *("dbrx", "jetmoe"),  # their own code, with our products
)
IN_INT8 = {"qwen2moe": "Q8_0", "qwen3moe": "Q8_0", "gpt_oss": "MXFP4", "qwen35": "Q4_1", "gemma4": "Q8_0"}


def drawn(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def with_experts(kind: str, _folder: Path) -> PreTrainedModel:
    if not kind.startswith("deepseek"):
        return zoo_model(kind)
    config = tiny_config(kind)  # with head sizes that our attention kernels serve
    config.qk_rope_head_dim, config.qk_head_dim, config.head_dim = 16, 32, 16
    return drawn(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def in_int8(case: str, folder: Path) -> PreTrainedModel:
    write(folder / "a.gguf", case, IN_INT8[case])
    return load(folder / "a.gguf", device="cpu", arithmetic="int8").model


def halves(dtype: torch.dtype, _folder: Path) -> PreTrainedModel:
    return store_half_weights(tiny_model(dtype=dtype, hidden=64, head_dim=32, heads=2, kv_heads=2))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
DENSE: dict[str, tuple[Family, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "norms and biases": ("qwen3", {"attention_bias": True}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "a window that is not used": ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "gelu": ("llama", {"hidden_act": "gelu"}),
}
_SOME = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": ("gemma3_text", {}), "mistral": ("mistral", {}), "qwen3": ("qwen3", _SOME), "llama4": ("llama4_text", {}),
    "none": ("gemma", {}), "no rope in some": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "no rope in windows": ("smollm3", {"no_rope_layers": [1, 0, 1, 0], **_SOME}),
}  # fmt: skip
MODELS = {
    **{f"dense: {name}": lambda _, of=of: tiny_model(of[0], **of[1]) for name, of in DENSE.items()},
    **{f"windows: {name}": lambda _, of=of: zoo_model(of[0], **of[1]) for name, of in WINDOWS.items()},
    **{f"experts: {kind}": partial(with_experts, kind) for kind in EXPERTS},
    **{f"recurrent: {family}": lambda _, family=family: recurrent_model(family) for family in RECURRENT},
    "recurrent: as many key heads": lambda _: recurrent_model("qwen3_5_text", linear_num_key_heads=4),
    **{f"int8: {case}": partial(in_int8, case) for case in IN_INT8},
    **{f"stored in {dtype}": partial(halves, dtype) for dtype in (torch.bfloat16, torch.float16)},
}
# One or two of each kind.
QUICK = {
    "windows: gemma2", "windows: gemma3", "windows: mistral", "windows: llama4", "experts: qwen3_moe", "experts: dbrx",
    "experts: gpt_oss", "experts: deepseek_v3", "stored in torch.bfloat16", *(f"dense: {name}" for name in DENSE),
    *(f"int8: {case}" for case in IN_INT8), *(f"recurrent: {family}" for family in KINDS),
}  # fmt: skip
# Layers that run by their own code, among dense models and those with windows.
OWN_CODE = ("dense: gelu", "windows: llama4")


def own_logits(model: PreTrainedModel, lengths: tuple[int, int] = LENGTHS) -> torch.Tensor:
    """What the model itself computes for the path of the longer sequence of :func:`check_tree_logits`."""
    tokens = [*random_tokens(lengths[0], lengths[0]), *random_tokens(7, 3)]
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, lengths[0] :].float()


@needs_kernels
@pytest.mark.parametrize("name", slow_except(MODELS, QUICK))
def test_a_row_of_a_tree_has_the_bits_of_plain_decoding(name, tmp_path):
    model = MODELS[name](tmp_path)
    runner = TargetRunner(model)
    if name.startswith(("dense", "windows")):
        assert bool(runner.execution_model.fused.layers) is (name not in OWN_CODE)
    rows = check_tree_logits(runner)
    assert len(set(rows.argmax(-1).tolist())) > 2
    if not name.startswith("int8"):  # where a last bit of a float may move what is rounded to eight bits
        torch.testing.assert_close(rows, own_logits(model), rtol=1e-3, atol=1e-3 * max(1, float(rows.abs().max())))


# Model, lengths of two texts, and the path of attention without kernels.
WITHOUT = {
    **{f: (partial(tiny_model, f), LENGTHS, path) for f, path in zip(FAMILIES, ("sdpa", "reference") * 2, strict=True)},
    "no text, and one token": (partial(tiny_model, "mistral"), (0, 1), "cpu"),
    "odd head size": (partial(tiny_model, head_dim=24, heads=3, kv_heads=3), LENGTHS, "cpu"),
    "experts": (partial(zoo_model, "qwen3_moe"), LENGTHS, "cpu"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_kernels_rows_are_equal_up_to_rounding(name, monkeypatch):
    make, lengths, path = WITHOUT[name]
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    monkeypatch.setenv("LONGDRAFT_ATTENTION", path)
    model = make()
    runner = TargetRunner(model)
    assert runner.attention_path == path
    rows = check_tree_logits(runner, partial(torch.allclose, **CLOSE), lengths)
    torch.testing.assert_close(rows, own_logits(model, lengths), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_and_rows_are_the_models_own(family):
    """Hidden states; queries after RoPE; keys and values as in the model's own cache."""
    model, tokens = tiny_model(family), random_tokens(30)
    runner = TargetRunner(model)
    store = runner.new_store(2, 40)
    prefill(runner, store, 1, tokens[:20])
    out = forward(runner, [tokens[20:]], store, [1], taps=Taps(hidden=(0, 2, 1), queries=(2,)))
    assert sorted(out.hidden) == [0, 1, 2] and sorted(out.queries) == [2]
    store.commit(1, range(10))
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([tokens]), use_cache=True, output_hidden_states=True)
        expected, layer = own.hidden_states, model.model.layers[2]
        x = layer.input_layernorm(expected[2][:, 20:])
        q = layer.self_attn.q_proj(x).view(1, 10, 6, 16)
        q = (layer.self_attn.q_norm(q) if family == "qwen3" else q).transpose(1, 2)
        wanted, _ = apply_rotary_pos_emb(q, q, *model.model.rotary_emb(x, torch.arange(20, 30)[None]))
    for i in (0, 1):
        torch.testing.assert_close(out.hidden[i], expected[i + 1][:, 20:], **CLOSE)
    # transformers reports the last one after the final norm; the tap is before it.
    torch.testing.assert_close(model.model.norm(out.hidden[2]), expected[3][:, 20:], **CLOSE)
    torch.testing.assert_close(out.logits, own.logits[:, 20:], **CLOSE)
    torch.testing.assert_close(out.queries[2], wanted, **CLOSE)
    for i, cached in enumerate(own.past_key_values.layers):
        torch.testing.assert_close(store.keys[i, 1, :, :30], cached.keys[0], **CLOSE)
        torch.testing.assert_close(store.values[i, 1, :, :30], cached.values[0], **CLOSE)


@needs_kernels
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_matrices_of_experts_stay_in_sixteen_bits(kind):
    model = zoo_model(kind).to(torch.bfloat16)
    weights = [w for w in model.model.layers[0].mlp.experts.parameters() if w.dim() == 3]
    bytes_before = sum(w.numel() * w.itemsize for w in weights)
    expected = zoo_model(kind)
    expected.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    store_half_experts(model)
    half_model = store_half_weights(model)
    experts = half_model.model.layers[0].mlp.experts
    assert not list(experts.parameters())
    assert sum(m.data.numel() for m in experts.children() if hasattr(m, "data")) == bytes_before
    assert all(torch.equal(t, expected.state_dict()[name]) for name, t in half_model.state_dict().items())
    texts = [
        Speculator("prompt-lookup", target=m).generate([random_tokens(20)], max_new_tokens=12)[0].token_ids
        for m in (expected, half_model)
    ]
    assert texts[0] == texts[1]
