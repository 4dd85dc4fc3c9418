"""A model whose layers, sizes or code change after its first use: text is its own as it is now, or refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from longdraft import PromptCache, Speculator
from longdraft.errors import UnsupportedModelError
from tests.support.tiny import tiny_model

IDS = torch.tensor([[3, 9, 14, 7, 22, 5] * 6])
NEW = 30
METHODS: dict[str | None, dict[str, Any]] = {
    "ar": {},
    "prompt-lookup": {"min_n": 1},
    "self": {"view": "streaming", "budget": 24, "sink": 4},
    "suffix": {},
    "magicdec": {},
    None: {},
}


def model() -> Any:
    return tiny_model(layers=3)


def own(m: Any) -> list[int]:
    known = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return list(m.generate(IDS, **known)[0, IDS.shape[1] :].tolist())


def handed_over(m: Any, spec: Speculator) -> list[int]:
    known = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return list(m.generate(IDS, **known, custom_generate=spec)[0, IDS.shape[1] :].tolist())


# --- layers and sizes ---


def pruned(m: Any) -> None:
    m.model.layers = m.model.layers[:2]
    m.config.num_hidden_layers = 2


def pruned_alone(m: Any) -> None:
    m.model.layers = m.model.layers[:2]


def told_less(m: Any) -> None:
    m.config.num_hidden_layers = 2


def deeper(m: Any) -> None:
    m.model.layers.append(copy.deepcopy(m.model.layers[0]))
    m.model.layers[3].self_attn.layer_idx = 3
    m.config.num_hidden_layers = 4


def replaced(m: Any) -> None:
    m.model.layers[1] = tiny_model(layers=3, seed=5).model.layers[1]


class Through(nn.Module):
    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def skipped(m: Any) -> None:
    m.model.layers[1] = Through()


def narrower(m: Any) -> None:
    for layer in m.model.layers:
        for name in ("gate_proj", "up_proj"):
            part = getattr(layer.mlp, name)
            part.weight = nn.Parameter(part.weight[:-16].clone())
        layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight[:, :-16].clone())


@pytest.mark.parametrize("change", [pruned, pruned_alone, told_less, deeper, replaced, skipped, narrower])
def test_what_was_settled_for_a_model_is_settled_again(change: Callable[[Any], None]) -> None:
    drafted = accepted = 0
    for name, options in METHODS.items():
        m = model()
        bound, free, cache = (
            Speculator(name, m, plan="fixed", **options),
            Speculator(name, plan="fixed", **options),
            PromptCache(),
        )
        bound.generate(IDS.tolist(), max_new_tokens=NEW, cache=cache)
        before = handed_over(m, free)
        change(m)
        expected = own(m)
        assert expected != before
        result = bound.generate(IDS.tolist(), max_new_tokens=NEW, cache=cache)[0]
        assert result.token_ids == handed_over(m, free) == handed_over(m, bound) == expected
        assert result.cached_tokens == 0
        drafted, accepted = drafted + result.drafted, accepted + result.accepted
    assert drafted > accepted > 0


def test_a_head_of_several_layers_is_refused_by_name() -> None:
    m = model()
    spec, before = Speculator("prompt-lookup", target=m), m.lm_head
    m.lm_head = nn.Sequential(nn.Linear(before.in_features, 8), nn.Linear(8, before.out_features))
    for run in (lambda: handed_over(m, spec), lambda: spec.generate(IDS.tolist()), lambda: Speculator("ar", target=m)):
        with pytest.raises(UnsupportedModelError, match="Sequential"):
            run()
    m.lm_head = before
    assert handed_over(m, spec) == own(m)


# --- functions ---


def louder(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any, **named: Any) -> Any:
        out = function(*args, **named)
        return tuple(each * 1.7 for each in out) if isinstance(out, tuple) else out * 1.7

    return inside


def pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., 1::2], -x[..., ::2]), -1)


def other_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As Liger replaces the norm of a class."""
    out: torch.Tensor = self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.01) * 0.8
    return out


def gelu_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))
    return out


PLACES: dict[str, tuple[Any, str, Any]] = {
    "rope": (modeling_llama, "apply_rotary_pos_emb", louder(modeling_llama.apply_rotary_pos_emb)),
    "half": (modeling_llama, "rotate_half", pairs),
    "half of another model": (modeling_llama, "rotate_half", modeling_cohere.rotate_half),
    "norm": (modeling_llama.LlamaRMSNorm, "forward", other_norm),
    "mlp": (modeling_llama.LlamaMLP, "forward", gelu_mlp),
    "rotary": (modeling_llama.LlamaRotaryEmbedding, "forward", louder(modeling_llama.LlamaRotaryEmbedding.forward)),
    "call of a norm": (modeling_llama.LlamaRMSNorm, "__call__", louder(nn.Module.__call__)),
    "layer": (modeling_llama.LlamaDecoderLayer, "forward", louder(modeling_llama.LlamaDecoderLayer.forward)),
    "product": (nn.Linear, "forward", louder(nn.Linear.forward)),
}
REFUSED: dict[str, tuple[Any, str, Any]] = {
    "scaled_dot_product_attention": (F, "scaled_dot_product_attention", louder(F.scaled_dot_product_attention)),
    "silu": (F, "silu", louder(F.silu)),
    "Tensor.pow": (torch.Tensor, "pow", louder(torch.Tensor.pow)),
    "Tensor.transpose": (torch.Tensor, "transpose", louder(torch.Tensor.transpose)),
    "Module.__call__": (nn.Module, "__call__", functools.wraps(nn.Module.__call__)(lambda *a, **k: None)),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_a_replaced_function_computes(place: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ar", "prompt-lookup"):
        m, cache = model(), PromptCache()
        unchanged = own(m)
        spec, free = Speculator(name, m, plan="fixed"), Speculator(name, plan="fixed")
        if when == "after":
            assert spec.generate(IDS.tolist(), max_new_tokens=NEW, cache=cache)[0].token_ids == unchanged
            assert handed_over(m, free) == unchanged
        with monkeypatch.context() as patch:
            patch.setattr(*PLACES[place])
            expected = own(m)
            assert expected != unchanged
            result = spec.generate(IDS.tolist(), max_new_tokens=NEW, cache=cache)[0]
            assert result.token_ids == handed_over(m, free) == expected
            assert name == "ar" or result.drafted
        assert spec.generate(IDS.tolist(), max_new_tokens=NEW, cache=cache)[0].token_ids == unchanged
        assert handed_over(m, free) == unchanged


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", REFUSED)
def test_a_replaced_function_of_torch_is_refused_by_name(
    place: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = model()
    spec = Speculator("prompt-lookup")
    if when == "after":
        assert handed_over(m, spec) == own(m)
    with monkeypatch.context() as patch:
        patch.setattr(*REFUSED[place])
        for run in (lambda: handed_over(m, spec), lambda: Speculator("ar", target=m)):
            with pytest.raises(UnsupportedModelError, match=place):
                run()
    assert handed_over(m, spec) == own(m)


def test_an_activation_and_a_forward_of_one_layer_are_seen() -> None:
    m = model()
    spec = Speculator("prompt-lookup", m, plan="fixed")
    before = handed_over(m, spec)
    m.model.layers[1].mlp.act_fn = nn.Tanh()
    assert before != handed_over(m, spec) == own(m)
    part = m.model.layers[0].mlp
    part.forward = louder(part.forward)
    assert handed_over(m, spec) == own(m)


def test_functions_of_the_attention_that_a_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    m.set_attn_implementation("eager")
    spec = Speculator("ar", target=m)
    monkeypatch.setattr(modeling_llama, "repeat_kv", louder(modeling_llama.repeat_kv))
    with pytest.raises(UnsupportedModelError, match="repeat_kv"):
        handed_over(m, spec)
