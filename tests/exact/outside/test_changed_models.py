"""A model whose weights, layers or code change after its first use: text is its own as it is now, with no KV of before,
or refused by name."""

from __future__ import annotations

import copy
import functools
import struct
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

import longdraft
from longdraft import PromptCache, Request, Speculator
from longdraft.errors import CapabilityError, CheckpointError, UnsupportedModelError
from tests.support.gguf_files import write_gguf
from tests.support.tiny import generate_tokens, tiny_model

PROMPT = [3, 9, 14, 7, 22, 5] * 6
NEW = 24
Change = Callable[[Any], Any]


def model(seed: int = 0) -> Any:
    return tiny_model(layers=3, seed=seed)


def lookups(m: Any = None) -> Speculator:
    return Speculator("prompt-lookup", m, min_n=1, plan="fixed")


def own(m: Any, **handed_over: Any) -> list[int]:
    return generate_tokens(m, PROMPT, NEW, pad_token_id=0, **handed_over)


def decoded(spec: Speculator, cache: PromptCache | None = None) -> longdraft.Result:
    return spec.generate([PROMPT], max_new_tokens=NEW, cache=cache)[0]


def louder(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any, **named: Any) -> Any:
        out = function(*args, **named)
        return tuple(each * 1.7 for each in out) if isinstance(out, tuple) else out * 1.7

    return inside


# --- weights and settings ---


class Adapted(nn.Module):
    """As adapters are: a layer around a layer."""

    def __init__(self, inner: nn.Linear, enabled: bool = True) -> None:
        super().__init__()
        self.inner, self.enabled = inner, enabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (3 if self.enabled else 1)


def attn(m: Any, i: int) -> Any:
    return m.model.layers[i].self_attn


def mlp(m: Any, i: int) -> Any:
    return m.model.layers[i].mlp


def adapt(m: Any) -> None:
    mlp(m, 1).up_proj = Adapted(mlp(m, 1).up_proj)


def by_numpy(m: Any) -> None:
    mlp(m, 1).up_proj.weight.detach().numpy()[...] *= 1.5


def merged(m: Any) -> None:
    """As packages for LoRA merge."""
    weight = attn(m, 1).q_proj.weight
    weight.data = weight.data + torch.ones_like(weight)


CHANGES: dict[str, Change] = {
    "in place": torch.no_grad()(lambda m: mlp(m, 2).down_proj.weight.mul_(1.5)),
    "one number": torch.no_grad()(lambda m: attn(m, 1).k_proj.weight[5, 7].add_(4.0)),
    "a row of data": lambda m: attn(m, 0).v_proj.weight.data[3].add_(4.0),
    "a token of data": lambda m: m.model.embed_tokens.weight.data[9].neg_(),
    "a norm of data": lambda m: m.model.layers[1].input_layernorm.weight.data[0].add_(1.0),
    "numpy": by_numpy,
    "loaded": lambda m: m.load_state_dict(model(1).state_dict()),
    "assigned": lambda m: m.load_state_dict(model(1).state_dict(), assign=True),
    "new parameter": lambda m: setattr(attn(m, 2).o_proj, "weight", nn.Parameter(attn(m, 2).o_proj.weight * 1.5)),
    "merged": merged,
    "epsilon": lambda m: setattr(m.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    "scaling": lambda m: setattr(attn(m, 0), "scaling", 2 * attn(m, 0).scaling),
    "activation": lambda m: setattr(mlp(m, 1), "act_fn", nn.Tanh()),
    "hook": lambda m: m.model.layers[0].register_forward_hook(lambda module, inputs, out: out * 1.1),
    "buffer": lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 0.5),
    "forward": lambda m: setattr(m.model.norm, "forward", lambda x: x * 0.5),
    "forward of a layer's part": lambda m: setattr(mlp(m, 0), "forward", louder(mlp(m, 0).forward)),
    "adapter": adapt,
    "adapter that is turned off": lambda m: setattr(mlp(m, 1).up_proj, "enabled", False),
}


def finished(session: longdraft.Session) -> longdraft.Result:
    number = session.add(Request(PROMPT, NEW))
    while session.busy:
        session.step()
    return session.take(number)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_writes_its_text_and_computes_its_kv_anew(tmp_path: Path, change: str) -> None:
    m, free, cache, tree = model(), lookups(), PromptCache(), PromptCache(tree_bytes=1 << 20)
    if change == "adapter that is turned off":
        adapt(m)
    spec = lookups(m)
    session = spec.session(batch=1)
    before = finished(session).token_ids
    assert before == decoded(spec, cache).token_ids == decoded(spec, tree).token_ids == own(m, custom_generate=free)
    assert decoded(spec, cache).cached_tokens
    spec.generate([[1, 2] * 60], max_new_tokens=1, cache=tree)  # what was there is in the tree now
    cache.save(tmp_path / "snapshot", spec.runner().fingerprint)
    CHANGES[change](m)
    expected = own(m)
    assert expected != before and own(m, custom_generate=free) == expected
    for result in (decoded(spec, cache), decoded(spec, tree), finished(session)):
        assert result.token_ids == expected and result.cached_tokens == 0 and result.drafted > result.accepted
    with pytest.raises(CheckpointError):
        decoded(spec, PromptCache.restored(tmp_path / "snapshot", spec.runner().fingerprint))


def test_an_equal_model_goes_on_with_the_kv_and_another_does_not(tmp_path: Path) -> None:
    """Loaded again, moved to another folder, or copied."""
    model().save_pretrained(tmp_path / "a")
    model().save_pretrained(tmp_path / "b")
    cache, kind, found = PromptCache(), type(model()), []
    equal = (kind.from_pretrained(tmp_path / "a"), kind.from_pretrained(tmp_path / "b"), copy.deepcopy(model()))
    for m in (*equal, model(seed=1)):
        found.append(decoded(Speculator("ar", target=m.train(bool(found))), cache))
    assert [r.cached_tokens > 0 for r in found] == [False, True, True, False]
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids


def test_a_replaced_method_that_only_prints_keeps_the_kv() -> None:
    """As torchao does with what it has quantised."""
    m, cache = model(), PromptCache()
    layer = m.model.layers[0].mlp.up_proj
    layer.extra_repr = MethodType(lambda self: "in eight bits", layer)
    spec = lookups(m)
    first, second = decoded(spec, cache), decoded(spec, cache)
    assert first.token_ids == second.token_ids == own(m) and second.cached_tokens > 0 == first.cached_tokens


def test_a_hook_that_changes_its_mind_keeps_nothing() -> None:
    m, strength = model(), [1.1]
    m.model.layers[0].register_forward_hook(lambda module, inputs, out: out * strength[0])
    spec, cache = Speculator("ar", target=m), PromptCache()
    decoded(spec, cache)
    strength[0] = 0.5
    result = decoded(spec, cache)
    assert result.cached_tokens == 0 and result.token_ids == own(m)


@pytest.mark.parametrize("part", ["attn_k", "attn_v", "ffn_down", "attn_norm", "epsilon"])
@pytest.mark.parametrize("weights", ["stored", "float32"])
def test_files_that_differ_in_one_part_have_two_names(tmp_path: Path, part: str, weights: Any) -> None:
    gguf = pytest.importorskip("gguf")
    names = []
    for i, path in enumerate((tmp_path / "a.gguf", tmp_path / "b.gguf")):
        write_gguf(path)
        content = bytearray(path.read_bytes())
        if i and part == "epsilon":
            key = b"llama.attention.layer_norm_rms_epsilon"
            place = content.index(key) + len(key) + 4
            content[place : place + 4] = struct.pack("<f", 1e-3)
        elif i:
            (offset,) = [t.data_offset for t in gguf.GGUFReader(path).tensors if t.name == f"blk.1.{part}.weight"]
            content[int(offset) + 37] ^= 1
        path.write_bytes(content)
        names.append(Speculator("ar", target=longdraft.load(path, weights=weights).model).runner().fingerprint)
    assert names[0] != names[1]


# --- layers and sizes ---


class Through(nn.Module):
    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def keep(m: Any, layers: int, told: int) -> None:
    m.model.layers, m.config.num_hidden_layers = m.model.layers[:layers], told


def deepen(m: Any) -> None:
    m.model.layers.append(copy.deepcopy(m.model.layers[0]))
    m.model.layers[3].self_attn.layer_idx = 3
    m.config.num_hidden_layers = 4


def narrow(m: Any) -> None:
    for layer in m.model.layers:
        for name in ("gate_proj", "up_proj"):
            part = getattr(layer.mlp, name)
            part.weight = nn.Parameter(part.weight[:-16].clone())
        layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight[:, :-16].clone())


LAYERS: dict[str, Change] = {
    "pruned": lambda m: keep(m, 2, 2),
    "pruned alone": lambda m: keep(m, 2, 3),
    "told less": lambda m: keep(m, 3, 2),
    "deeper": deepen,
    "replaced": lambda m: m.model.layers.__setitem__(1, model(seed=5).model.layers[1]),
    "skipped": lambda m: m.model.layers.__setitem__(1, Through()),
    "narrower": narrow,
}
METHODS: dict[str | None, dict[str, Any]] = {
    "prompt-lookup": {"min_n": 1}, "self": {"view": "streaming", "budget": 24, "sink": 4}, None: {},
}  # fmt: skip


@pytest.mark.parametrize("change", LAYERS)
def test_what_was_settled_for_a_model_is_settled_again(change: str) -> None:
    drafted = accepted = 0
    for name, options in METHODS.items():
        m, cache = model(), PromptCache()
        bound, free = (Speculator(name, target, plan="fixed", **options) for target in (m, None))
        decoded(bound, cache)
        before = own(m, custom_generate=free)
        run, session = bound.stream([PROMPT], max_new_tokens=NEW), bound.session(1)
        session.add(Request(PROMPT, NEW))
        next(iter(run)), session.step()
        LAYERS[change](m)
        expected = own(m)
        assert expected != before
        result = decoded(bound, cache)
        assert result.token_ids == own(m, custom_generate=free) == own(m, custom_generate=bound) == expected
        assert result.cached_tokens == 0
        drafted, accepted = drafted + result.drafted, accepted + result.accepted
        for next_step in (run.results, session.step) if change in ("pruned", "deeper") else ():
            with pytest.raises(CapabilityError, match="Start the run again"):  # what had begun goes not on
                next_step()
    assert drafted > accepted > 0


# --- functions ---


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
    "repeat_kv": (modeling_llama, "repeat_kv", louder(modeling_llama.repeat_kv)),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_replaced_function_computes(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model's first use, and after it."""
    m, cache = model(), PromptCache()
    unchanged, spec, free = own(m), lookups(m), Speculator("ar", plan="fixed")
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(*PLACES[place])
            expected, result = own(m), decoded(spec, cache)
            assert expected != unchanged and result.drafted
            assert result.token_ids == own(m, custom_generate=free) == expected
        assert decoded(spec, cache).token_ids == own(m, custom_generate=free) == unchanged


@pytest.mark.parametrize("place", REFUSED)
def test_a_replaced_function_of_the_attention_or_of_torch_is_refused_by_name(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, spec = model(), Speculator("prompt-lookup")
    m.set_attn_implementation("eager" if place == "repeat_kv" else "sdpa")
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(*REFUSED[place])
            for run in (lambda: own(m, custom_generate=spec), lambda: Speculator("ar", target=m)):
                with pytest.raises(UnsupportedModelError, match=place):
                    run()
        assert own(m, custom_generate=spec) == own(m)
