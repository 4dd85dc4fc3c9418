"""Decoder layers on a GPU in few launches: norms, RoPE with the KV write, and SwiGLU are kernels of ours.

A layer of the Llama kind launches some fifty kernels by its own code, each of a microsecond or two for the rows of a
verification. Here it launches nine and those of its attention. Products are torch's; those of the same rows are one if
the weights lie side by side (:mod:`.side_by_side`). A layer is compared with its own code before it is used
(:mod:`longdraft.model.fused`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from longdraft.attention import custom_ops
from longdraft.model import hosting
from longdraft.model.gpu import operators as operators  # defines the operators
from longdraft.model.gpu.merged_linear import MergedLinear
from longdraft.model.layer_parts import (
    LINEAR_NAMES,
    NO_ROTATION,
    CosSin,
    LayerKinds,
    is_modified,
    norm_of,
    norm_weight_offset,
    uses_gelu,
)

# Numbers of a row that a program of the norm kernel holds in registers.
MAX_HIDDEN = 32768
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ops = torch.ops.longdraft


def supports(model: PreTrainedModel) -> bool:
    """True if the kernels can run where a model is, in its dtype."""
    there = model.device.type == "cuda" and torch.version.hip is None
    return there and model.dtype in _DTYPES and custom_ops.triton_enabled()


class FusedLayer(NamedTuple):
    """The parts of a decoder layer of the Llama kind.

    Attributes:
        norm, mlp_norm: weights (hidden,) of the norms before the attention and before the MLP.
        eps, mlp_eps, qk_eps: their epsilons, and that of ``q_norm`` and ``k_norm``.
        qkv, gate_up: the products that get the same rows.
        out, down: the attention's and the MLP's last product.
        q_norm, k_norm: weights (d,) of the heads' norms; None if heads are not normed.
        d, scale: size of a head, and factor of the scores.
    """

    attn_norm: torch.Tensor
    attn_eps: float
    mlp_norm: torch.Tensor
    mlp_eps: float
    qkv: MergedLinear
    o_proj: nn.Linear
    gate_up: MergedLinear
    down_proj: nn.Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qk_eps: float
    head_dim: int
    scale: float

    def run(self, x: torch.Tensor, cos_sin: CosSin, hosted: hosting.ForwardContext, kv_layer: int) -> torch.Tensor:
        """x (B, T, hidden) -> the layer's output, in a new tensor.

        Args:
            cos_sin: (B or 1, T, r) each.
            kv_layer: index of its rows in the store.
        """
        block, (keys, values) = hosted.batch, hosted.store.layer(kv_layer)
        q, k, v = self.qkv(ops.rms_norm(x, self.attn_norm, self.attn_eps))
        into = block.write_starts_t  # where a recorded block is written, if not behind its prefix
        first = (block.prefix_lens_t, block.tree_offset) if into is None else (into, 0)
        queries = ops.rope_and_write_kv(
            *(q, k, v, *cos_sin, self.q_norm, self.k_norm, self.qk_eps, keys, values, block.slots_t, *first)
        )
        if kv_layer in hosted.query_layers:
            hosted.queries[kv_layer] = queries
        hosted.num_attention_calls += 1
        attended = hosted.attend(queries, keys, values, block, self.scale).transpose(1, 2).flatten(2)
        total, normed = ops.add_rms_norm(x, _product(self.o_proj, attended), self.mlp_norm, self.mlp_eps)
        gate, up = self.gate_up(normed)
        return total + _product(self.down_proj, ops.silu_and_mul(gate, up))


def _product(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, layer.weight, layer.bias)


def fused_layer_of(layer: nn.Module, head_dim: int) -> FusedLayer | None:
    """A layer for the kernels; None if it is of another kind, or if the user has hooks inside it.

    Args:
        head_dim: where the attention does not say it.
    """
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    inside = [m for m in layer.modules() if m is not layer]
    # Hooks of the layer itself do no harm: they run around any forward.
    if attention is None or mlp is None or any(map(is_modified, inside)) or "forward" in vars(layer):
        return None
    found = [getattr(attention, name, None) or getattr(mlp, name, None) for name in LINEAR_NAMES]
    linear = [x for x in found if type(x) is nn.Linear]
    modules: list[Any] = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    modules += [own for name in ("q_norm", "k_norm") if (own := getattr(attention, name, None)) is not None]
    norms = [own for module in modules if (own := norm_of(module)) is not None]
    if len(linear) < len(found) or len(norms) < len(modules) or len(modules) == 3:
        return None
    parameters = list(layer.parameters())
    # Quantised weights and shares of several processes are subclasses that hold other tensors.
    plain = not any(hasattr(type(p), "__tensor_flatten__") for p in parameters)
    if not plain or len({(p.dtype, p.device) for p in parameters}) > 1:
        return None
    scored = [getattr(attention, name, None) for name in ("attn_logit_softcapping", "sinks", "sliding_window")]
    # A parameter that is not read belongs to a part that these kernels know nothing of.
    read = {id(p) for module in (*linear, *modules) for p in module.parameters()}
    if {id(p) for p in parameters} != read or any(x is not None for x in scored):
        return None
    (norm, eps), (mlp_norm, mlp_eps), *heads = norms
    d = int(getattr(attention, "head_dim", head_dim))
    if len({own[1] for own in heads}) > 1 or any(own[0].shape != (d,) for own in heads) or norm.numel() > MAX_HIDDEN:
        return None
    if norm_weight_offset(modules) != 0 or uses_gelu(getattr(mlp, "act_fn", None)) is not False:
        return None
    return FusedLayer(
        attn_norm=norm,
        attn_eps=eps,
        mlp_norm=mlp_norm,
        mlp_eps=mlp_eps,
        qkv=MergedLinear(linear[:3]),
        o_proj=linear[3],
        gate_up=MergedLinear(linear[4:6]),
        down_proj=linear[6],
        q_norm=heads[0][0] if heads else None,
        k_norm=heads[1][0] if heads else None,
        qk_eps=heads[0][1] if heads else 0.0,
        head_dim=d,
        scale=float(getattr(attention, "scaling", d**-0.5)),
    )


class FusedLayerForward:
    """The forward of one layer by the kernels, or by its own code (``original``) if they do not serve."""

    def __init__(self, layer: FusedLayer, kinds: LayerKinds, index: int, original: Callable[..., Any]) -> None:
        self._layer, self.original = layer, original
        self._place, self._rope = kinds.cache_indices[index], kinds.kinds[kinds.kind_indices[index]].rope

    def __call__(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        hosted = named["longdraft_attend"]
        if not hosted.fused:
            return self.original(hidden_states, *more, **named)
        cos, sin = (x.to(hidden_states) for x in (NO_ROTATION if self._rope is None else named["position_embeddings"]))
        return self._layer.run(hidden_states, (cos, sin), hosted, self._place)
