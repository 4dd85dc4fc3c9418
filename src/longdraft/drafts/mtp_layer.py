"""Makes and runs the decoder layer of an MTP head (multi-token prediction), which has the target's layer class.

transformers' class computes the layer, so gates, latent attention and experts need no code of ours. The caller supplies
the attention function. Shapes: T tokens of packed sequences (one behind the other), Hkv KV heads, head size d.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.drafts.small_llama import PackedAttend, packed_attention
from longdraft.errors import UnsupportedModelError
from longdraft.model import hosting
from longdraft.model.layers.skinny_gemm import is_half_matrix
from longdraft.model.model_parts import decoder_config, decoder_layers
from longdraft.model.quant import stored_model
from longdraft.native import QuantizedMatrix, kernels


def new_decoder_layer(model: PreTrainedModel, sparse: bool) -> nn.Module:
    """Makes a decoder layer of the model's layer class on the meta device, with full attention.

    ``sparse``: True makes a layer with experts, as in transformers' ``mlp_layer_types``.
    Raises UnsupportedModelError if the class cannot be constructed, or lacks a part that the functions here use."""
    config = copy.deepcopy(decoder_config(model))
    config._attn_implementation = hosting.ATTENTION_NAME
    # Settings of the layer with index 0, by which different models choose attention and MLP.
    overrides: dict[str, Any] = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0 if sparse else 1,
    }
    for name, value in overrides.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    if getattr(config, "_experts_implementation", None) is not None:
        config._experts_implementation = "eager"  # transformers' loop over experts, which needs no grouped GEMM
    layer_class: Any = type(decoder_layers(model)[-1])
    try:
        with torch.device("meta"):
            layer: nn.Module = layer_class(config, 0)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise UnsupportedModelError(f"{layer_class.__name__} cannot be constructed ({error!r}).") from error
    if not all(hasattr(layer, name) for name in ("self_attn", "input_layernorm", "mlp")):
        raise UnsupportedModelError(f"{layer_class.__name__} lacks self_attn, input_layernorm or mlp.")
    return layer


def new_norm(layer: nn.Module, size: int, eps: float) -> nn.Module:
    """Makes a norm of the class that the layer's own norms have, on the meta device."""
    norm_class: Any = type(layer.input_layernorm)
    with torch.device("meta"):
        norm: nn.Module = norm_class(size, eps=eps)
    return norm


def load_weights(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor | QuantizedMatrix],
    device: torch.device,
    dtype: torch.dtype,
    int8: bool,
) -> nn.Module:
    """Loads weights into a module. Matrices in 16 bits stay so if our kernels can read them."""
    loaded = dict(weights)
    for name, weight in weights.items() if kernels() is not None else ():
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and is_half_matrix(weight):
            loaded[name] = QuantizedMatrix.from_half(weight)
    stored_model.load_weights(module, loaded, device, dtype, int8)
    return module.requires_grad_(False).eval()


def compute_kv(
    layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys (after RoPE) and values of hidden states x (T, hidden), both (Hkv, T, d).
    cos and sin are (T, rotary dimensions). If a key and a value differ in size, the smaller is padded to d."""
    recorded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        recorded.append((k, v))
        return torch.zeros_like(q)

    decoder_layer: Any = layer
    decoder_layer.self_attn(
        hidden_states=decoder_layer.input_layernorm(x[None]),
        position_embeddings=(cos[None], sin[None]),
        attention_mask=None,
        longdraft_attend=packed_attention(record),
    )
    return recorded[0]


def run_layer(
    layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: PackedAttend
) -> torch.Tensor:
    """Returns the layer's output (T, hidden) for x (T, hidden). cos and sin are (T, rotary dimensions)."""
    attention = packed_attention(attend)
    out = layer(x[None], attention_mask=None, position_embeddings=(cos[None], sin[None]), longdraft_attend=attention)
    hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return hidden.view(x.shape)
