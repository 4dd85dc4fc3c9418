"""Mixtures of experts: a row has the same bits whatever rows are beside it, whichever experts these are routed to."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from longdraft.model.runner import TargetRunner
from longdraft.model.stored import keep_stored
from longdraft.model.stored_experts import keep_experts
from longdraft.native import kernels
from longdraft.speculator import Speculator
from tests.tree_rows import plain_and_tree, text
from tests.zoo.tiny_models import tiny_config, tiny_model

# Head sizes that our attention kernels serve.
OVERRIDES = {
    "deepseek_v2": {"qk_rope_head_dim": 16, "qk_head_dim": 32, "head_dim": 16},
    "deepseek_v3": {"qk_rope_head_dim": 16, "qk_head_dim": 32, "head_dim": 16},
}
KINDS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "llama4_text", "glm4_moe", *OVERRIDES),
    *("granitemoe", "nemotron_h", "phimoe"),
    # Their own code, with our products.
    *("dbrx", "jetmoe"),
)


def made(kind):
    if kind not in OVERRIDES:
        return tiny_model(kind)
    config = tiny_config(kind)
    for name, value in OVERRIDES[kind].items():
        setattr(config, name, value)
    return drawn(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def drawn(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("kind", dict.fromkeys(KINDS))
def test_a_row_of_a_tree_has_the_bits_of_plain_decoding(kind, caplog):
    if kernels() is None:
        pytest.skip("without kernels rows are equal up to rounding")
    with caplog.at_level(logging.WARNING):
        runner = TargetRunner(made(kind))
    assert "row by row" not in caplog.text
    plain, tree = plain_and_tree(runner, text(40), text(12, 3))
    assert torch.equal(plain, tree)
    assert len(set(plain.argmax(-1).tolist())) > 3


def test_without_kernels_rows_are_equal_up_to_rounding(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    model = made("qwen3_moe")
    plain, tree = plain_and_tree(TargetRunner(model), text(40), text(12, 3))
    torch.testing.assert_close(plain, tree, rtol=1e-3, atol=1e-3)
    prompt = text(20)
    (result,) = Speculator("prompt-lookup", target=model).generate([prompt], max_new_tokens=16)
    own = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, 20:].tolist()
    assert result.token_ids == own


class Odd(nn.Module):
    """A mixture whose last bits depend on the number of rows."""

    def __init__(self, hidden):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))

    def forward(self, x):
        # A relative 1e-6 for each row, which is what another order of a sum would do.
        return (self.experts[0](x) + self.experts[1](x)) * (1 + 1e-6 * x.shape[1])


def test_a_mixture_that_is_not_exact_is_computed_row_by_row_and_this_is_said(caplog):
    if kernels() is None:
        pytest.skip("without kernels rows are equal up to rounding")
    model = tiny_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp = Odd(64).requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        runner = TargetRunner(drawn(model))
    assert caplog.text.count("Odd is computed row by row") == 1
    assert torch.equal(*plain_and_tree(runner, text(30), text(12, 3)))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_matrices_of_experts_stay_in_sixteen_bits(kind):
    if kernels() is None:
        pytest.skip("kernels read 16 bits")
    model = tiny_model(kind).to(torch.bfloat16)
    weights = [w for w in model.model.layers[0].mlp.experts.parameters() if w.dim() == 3]
    bytes_before = sum(w.numel() * w.itemsize for w in weights)
    expected = tiny_model(kind)
    expected.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    keep_experts(model)
    kept = keep_stored(model)
    experts = kept.model.layers[0].mlp.experts
    assert not list(experts.parameters())
    assert sum(m.data.numel() for m in experts.children() if hasattr(m, "data")) == bytes_before
    assert all(torch.equal(t, expected.state_dict()[name]) for name, t in kept.state_dict().items())
    prompt = text(20)
    own, ours = (
        Speculator("prompt-lookup", target=m).generate([prompt], max_new_tokens=12)[0] for m in (expected, kept)
    )
    assert own.token_ids == ours.token_ids
