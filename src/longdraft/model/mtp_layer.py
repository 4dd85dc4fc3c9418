"""A decoder layer of a target's own class, with other weights, that attends by a function of the caller.

Checkpoints with heads for further tokens (MTP) hold one more decoder layer, of the kind that the model is made of. The
target's class computes it, so gates, latent heads and experts need no code of ours.
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
    """A decoder layer with full attention of a model's own class, without weights.

    Args:
        sparse: the layer has experts, where the model's layers may.

    Raises:
        UnsupportedModelError: the model's layers are of no such class.
    """
    config = copy.deepcopy(hosting.decoder_config(model))
    config._attn_implementation = hosting.ATTENTION_NAME
    mlp = "sparse" if sparse else "dense"
    changes: dict[str, Any] = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": [mlp],
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0 if sparse else 1,
    }
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    if getattr(config, "_experts_implementation", None) is not None:
        config._experts_implementation = "eager"
    kind: Any = type(hosting.decoder_layers(model)[-1])
    try:
        with torch.device("meta"):
            layer: nn.Module = kind(config, 0)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise UnsupportedModelError(f"{kind.__name__} cannot be made once more ({error!r}).") from error
    if not all(hasattr(layer, name) for name in ("self_attn", "input_layernorm", "mlp")):
        raise UnsupportedModelError(f"{kind.__name__} has no attention, norm and MLP as longdraft knows them.")
    return layer


def new_norm(layer: nn.Module, size: int, eps: float) -> nn.Module:
    """A norm of the class that a layer has, without weights."""
    kind: Any = type(layer.input_layernorm)
    with torch.device("meta"):
        norm: nn.Module = kind(size, eps=eps)
    return norm


def original_context_length(model: PreTrainedModel) -> int | None:
    """Tokens of the longest text that a model was trained for before its RoPE was stretched; None if it was not."""
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
    """:func:`~longdraft.model.stored_model.load_weights` for all weights of a draft. With kernels, halves stay so."""
    halves = (
        {}
        if kernels() is None
        else {
            name: QuantizedMatrix.from_half(each)
            for name, each in weights.items()
            if isinstance(each, torch.Tensor) and each.dim() == 2 and is_half_matrix(each)
        }
    )
    stored_model.load_weights(module, {**weights, **halves}, device, dtype, int8)
    return module.requires_grad_(False).eval()


def compute_kv(
    layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys after RoPE and values (Hkv, T, d) of rows x (T, hidden), heads as wide as the widest."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kept.append((k, v))
        return torch.zeros_like(q)

    own: Any = layer
    rows = own.input_layernorm(x[None])
    own.self_attn(
        hidden_states=rows,
        position_embeddings=(cos[None], sin[None]),
        attention_mask=None,
        longdraft_attend=packed_attention(keep),
    )
    return kept[0]


def run_layer(
    layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: PackedAttend
) -> torch.Tensor:
    """The layer's output (T, hidden) for rows x (T, hidden) of packed texts; cos, sin (T, rotated dimensions)."""
    given = {
        "attention_mask": None,
        "position_embeddings": (cos[None], sin[None]),
        "longdraft_attend": packed_attention(attend),
    }
    out = layer(x[None], **given)
    rows: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return rows.view(x.shape)
