"""Reads the parts of decoder layers for our kernels: norms, products, activation, scale, soft cap and sinks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from longdraft.model import hosting
from longdraft.model.few_rows import weights_of
from longdraft.model.fingerprints import is_known
from longdraft.model.layout import decoder_config
from longdraft.native import DecoderLayer
from longdraft.native.boundary import FLOATS
from longdraft.native.library import HEAD_UNIT
from longdraft.native.structures import Norm, Weights

_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The kernels' name of a norm -> transformers' name. In a layer of the Gemma kind the norm after the attention is one of
# its output; in one of the Llama kind it is one of the MLP's input.
_LLAMA = {"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GEMMA = {
    "norm": "input_layernorm",
    "attended_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "done_norm": "post_feedforward_layernorm",
}


def layer_of(layer: nn.Module, head_dim: int) -> DecoderLayer | None:
    """A layer for our kernels; None if it is of another kind, or if the user has hooks inside it.

    Args:
        head_dim: where the attention does not say it.
    """
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or not is_untouched(layer):
        return None
    products = products_of([getattr(attention, name, None) or getattr(mlp, name, None) for name in _PRODUCTS])
    names = _GEMMA if hasattr(layer, _GEMMA["mlp_norm"]) else _LLAMA
    of_layer = {name: getattr(layer, theirs, None) for name, theirs in names.items()}
    of_heads = {name: own for name in ("q_norm", "k_norm") if (own := getattr(attention, name, None)) is not None}
    norms = norms_of(of_layer | of_heads)
    gelu = is_gelu(getattr(mlp, "act_fn", None))
    if products is None or norms is None or gelu is None:
        return None
    plus = plus_of((of_layer | of_heads).values())
    d = int(getattr(attention, "head_dim", head_dim))
    if plus is None or d % HEAD_UNIT:
        return None
    # Not those that q gives: it may give gates too.
    out = products[3][0].shape[1]
    return DecoderLayer(
        norms,
        products,
        *(out // d, products[1][0].shape[0] // d, d, float(getattr(attention, "scaling", d**-0.5))),
        softcap=getattr(attention, "attn_logit_softcapping", None),
        sinks=getattr(attention, "sinks", None),
        gelu=gelu,
        plus=plus,
    )


def is_untouched(layer: nn.Module, ours: nn.Module | None = None) -> bool:
    """True if a layer's parts are float32 on the CPU, contiguous, and without the user's hooks.

    Args:
        ours: a part whose forward is ours.
    """
    inside = [m for m in layer.modules() if m is not layer]
    # Hooks of the layer itself do no harm: they run around any forward.
    if any(touched(m, m is ours) for m in inside) or "forward" in vars(layer) or not is_known(type(layer).forward):
        return False
    tensors = [t for m in inside for t in m.parameters(recurse=False)]
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def products_of(modules: Iterable[nn.Module | None]) -> list[Weights] | None:
    """The weights of all products; None if one is missing or of another kind."""
    found = [None if module is None else weights_of(module) for module in modules]
    return None if None in found else [weights for weights in found if weights is not None]


def norms_of(modules: Mapping[str, nn.Module | None]) -> dict[str, Norm] | None:
    """All norms by name; None if one is missing or of another kind."""
    found = {name: norm for name, module in modules.items() if (norm := norm_of(module)) is not None}
    return found if len(found) == len(modules) else None


def ends_of(model: PreTrainedModel, layers: Iterable[nn.Module]) -> dict[str, Any] | None:
    """The final norm and the head, as a :class:`DecoderStack` takes them; None if they are of another kind, or if the
    user has hooks in the model."""
    decoder, head = hosting.decoder_of(model), model.get_output_embeddings()
    final = getattr(decoder, "norm", None)
    norm, weights = norm_of(final), weights_of(head)
    modules = [model, decoder, model.get_input_embeddings(), head, *decoder.children(), *layers]
    if norm is None or weights is None or any(map(touched, modules)):
        return None
    plus = plus_of([final])
    cap = getattr(decoder_config(model), "final_logit_softcapping", None)
    return None if plus is None else {"norm": norm, "head": weights, "plus": plus, "softcap": cap}


def norm_of(module: nn.Module | None) -> Norm | None:
    """Weight and epsilon of an RMSNorm; None if the module has none."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return None
    return weight.detach(), eps


@torch.inference_mode()
def plus_of(norms: Iterable[nn.Module | None]) -> float | None:
    """The number that norms add to their weights: 1 in Gemma's, else 0; None if they differ."""
    found = set()
    for norm in norms:
        assert norm is not None
        weight = norm.weight
        assert isinstance(weight, torch.Tensor)
        # An RMS norm of ones is its weight.
        ones = norm(weight.new_ones(1, weight.numel()))[0]
        found.add(float((ones - weight - 1).abs().sum() < (ones - weight).abs().sum()))
    return found.pop() if len(found) == 1 else None


@torch.inference_mode()
def is_gelu(activation: nn.Module | None) -> bool | None:
    """True for GELU by tanh, False for SiLU, None for another function: by its values, as names differ."""
    if not isinstance(activation, nn.Module):
        return None
    x = torch.linspace(-6, 6, 101, **FLOATS)
    for gelu, own in ((False, F.silu(x)), (True, F.gelu(x, approximate="tanh"))):
        if torch.allclose(activation(x), own, rtol=1e-5, atol=1e-6):
            return gelu
    return None


def touched(module: nn.Module, ours: bool = False) -> bool:
    """True if a module has hooks, a forward that replaces its class's and is not ``ours``, or a class of the user's."""
    replaced = ("forward" in vars(module) and not ours) or not is_known(type(module).forward)
    return bool(module._forward_hooks or module._forward_pre_hooks or replaced)
