"""Models of every kind: a row of a tree has the bits of a plain step, whoever is beside it, and goes on with them.

Trees of any shape, threads and instruction sets are tried in tests/test_bits.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from longdraft import Speculator, load
from longdraft.model.layers.experts import store_half_experts
from longdraft.model.quant.stored_model import store_half_weights
from longdraft.model.runner import TargetRunner
from tests.native.levels import needs_kernels
from tests.support.gguf_architectures import write
from tests.support.recurrent_models import FAMILIES, KINDS, recurrent_model
from tests.support.slow_marks import slow_except
from tests.support.tiny import generate_tokens, tiny_model
from tests.support.tree_logits import check_tree_logits, random_tokens
from tests.support.window_models import NAMES, window_model
from tests.zoo.tiny_models import tiny_config
from tests.zoo.tiny_models import tiny_model as zoo_model

EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "llama4_text", "glm4_moe", "granitemoe"),
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


MODELS = {
    **{f"windows: {name}": lambda _, name=name: window_model(name) for name in NAMES},
    **{f"experts: {kind}": partial(with_experts, kind) for kind in EXPERTS},
    **{f"recurrent: {family}": lambda _, family=family: recurrent_model(family) for family in FAMILIES},
    **{f"int8: {case}": partial(in_int8, case) for case in IN_INT8},
    **{f"stored in {dtype}": partial(halves, dtype) for dtype in (torch.bfloat16, torch.float16)},
    "biases": lambda _: tiny_model("qwen3", attention_bias=True),
}
# One or two of each kind.
QUICK = {
    "windows: gemma2", "windows: gemma3", "windows: mistral", "windows: llama4", "experts: qwen3_moe", "experts: dbrx",
    "experts: gpt_oss", "experts: deepseek_v3", "stored in torch.bfloat16", "biases",
    *(f"int8: {case}" for case in IN_INT8), *(f"recurrent: {family}" for family in KINDS),
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("name", slow_except(MODELS, QUICK))
def test_a_row_of_a_tree_has_the_bits_of_plain_decoding(name, tmp_path):
    rows = check_tree_logits(TargetRunner(MODELS[name](tmp_path)))
    assert len(set(rows.argmax(-1).tolist())) > 2


def test_without_kernels_rows_are_equal_up_to_rounding_and_the_text_is_the_models_own(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    model = zoo_model("qwen3_moe")
    check_tree_logits(TargetRunner(model), partial(torch.allclose, rtol=1e-3, atol=1e-3))
    prompt = random_tokens(20)
    (result,) = Speculator("prompt-lookup", target=model).generate([prompt], max_new_tokens=16)
    assert result.token_ids == generate_tokens(model, prompt, 16)


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
