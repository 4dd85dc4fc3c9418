"""The decoder layer of an MTP head (multi-token prediction): an instance of the target's layer class, with own weights.

transformers' class computes the layer, so gates, latent attention and experts need no code of ours. The caller supplies
the attention function.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.errors import UnsupportedModelError
from longdraft.model import hosting, stored_model
from longdraft.model.skinny_gemm import is_half_matrix
from longdraft.model.small_llama import PackedAttend, packed_attention
from longdraft.native import QuantizedMatrix, kernels


def new_decoder_layer(model: PreTrainedModel, sparse: bool) -> nn.Module:
    """A decoder layer of a model's own class, on the meta device: with full attention, and experts if ``sparse``.

    Raises UnsupportedModelError if the class cannot be constructed, or lacks a part that the functions here use."""
    config = copy.deepcopy(hosting.decoder_config(model))
    config._attn_implementation = hosting.ATTENTION_NAME
    # The one layer has index 0 in its configuration.
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
        config._experts_implementation = "eager"
    layer_class: Any = type(hosting.decoder_layers(model)[-1])
    try:
        with torch.device("meta"):
            layer: nn.Module = layer_class(config, 0)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise UnsupportedModelError(f"{layer_class.__name__} cannot be constructed ({error!r}).") from error
    if not all(hasattr(layer, name) for name in ("self_attn", "input_layernorm", "mlp")):
        raise UnsupportedModelError(f"{layer_class.__name__} lacks self_attn, input_layernorm or mlp.")
    return layer


def new_norm(layer: nn.Module, size: int, eps: float) -> nn.Module:
    """A norm of the same class as a layer's norms, on the meta device."""
    norm_class: Any = type(layer.input_layernorm)
    with torch.device("meta"):
        norm: nn.Module = norm_class(size, eps=eps)
    return norm


def original_context_length(model: PreTrainedModel) -> int | None:
    """The context length, in tokens, before RoPE scaling; None without scaling."""
    rope = getattr(hosting.decoder_config(model), "rope_parameters", None) or {}
    length = rope.get("original_max_position_embeddings")
    return None if length is None else int(length)


def load_weights(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor | QuantizedMatrix],
    device: torch.device,
    dtype: torch.dtype,
    int8: bool,
) -> nn.Module:
    """:func:`~longdraft.model.stored_model.load_weights`, but 16-bit matrices stay so if our kernels can read them."""
    loaded = dict(weights)
    for name, weight in weights.items() if kernels() is not None else ():
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and is_half_matrix(weight):
            loaded[name] = QuantizedMatrix.from_half(weight)
    stored_model.load_weights(module, loaded, device, dtype, int8)
    return module.requires_grad_(False).eval()


def compute_kv(
    layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys after RoPE and values, (Hkv, T, d) each, of x (T, hidden). The smaller head size is padded to the larger."""
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
    """The layer's output (T, hidden) for packed sequences x (T, hidden), with cos and sin (T, rotated dimensions)."""
    attention = packed_attention(attend)
    out = layer(x[None], attention_mask=None, position_embeddings=(cos[None], sin[None]), longdraft_attend=attention)
    hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return hidden.view(x.shape)
