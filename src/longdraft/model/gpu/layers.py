"""Fused decoder layers on a GPU: Triton kernels for norms, RoPE with the KV write, and SwiGLU.

In a verification, transformers' code of a layer launches about fifty kernels of one or two microseconds each. A fused
layer launches nine kernels besides attention. GEMMs are torch's, merged if the weights are (:mod:`.merged_linear`).
:mod:`longdraft.model.fused` compares a fused layer with transformers' code before its first use.
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

MAX_HIDDEN = 32768  # the largest row that a program of the norm kernel holds in registers
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ops = torch.ops.longdraft


def supports(model: PreTrainedModel) -> bool:
    """True if the kernels run on a model's device and dtype."""
    on_nvidia = model.device.type == "cuda" and torch.version.hip is None
    return on_nvidia and model.dtype in _DTYPES and custom_ops.triton_enabled()


class FusedLayer(NamedTuple):
    """Weights and constants of a decoder layer of the Llama kind.

    Attributes:
        attn_norm, mlp_norm: weights (hidden_size,) of the norms before the attention and the MLP.
        attn_eps, mlp_eps, qk_eps: epsilons of the norms.
        qkv, o_proj, gate_up, down_proj: the projections of the attention and of the MLP.
        q_norm, k_norm: weights (head_dim,) of the norms of each head's queries and keys; None without such norms.
        scale: the softmax scale.
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

    def run(self, x: torch.Tensor, cos_sin: CosSin, context: hosting.ForwardContext, kv_layer: int) -> torch.Tensor:
        """Maps x (batch_size, query_len, hidden_size) to the layer's output, a new tensor. ``cos_sin``: two tensors
        (batch_size or 1, query_len, rotary_dim). ``kv_layer`` is the layer's index in the KV store."""
        batch, (keys, values) = context.batch, context.store.layer(kv_layer)
        q, k, v = self.qkv(ops.rms_norm(x, self.attn_norm, self.attn_eps))
        write_starts = batch.write_starts_t  # not None in CUDA graphs
        kv_location = (batch.prefix_lens_t, batch.tree_offset) if write_starts is None else (write_starts, 0)
        queries = ops.rope_and_write_kv(
            *(q, k, v, *cos_sin, self.q_norm, self.k_norm, self.qk_eps, keys, values, batch.slots_t, *kv_location)
        )
        if kv_layer in context.query_layers:
            context.queries[kv_layer] = queries
        context.num_attention_calls += 1
        attn_out = context.attend(queries, keys, values, batch, self.scale).transpose(1, 2).flatten(2)
        residual, normed = ops.add_rms_norm(x, _linear(self.o_proj, attn_out), self.mlp_norm, self.mlp_eps)
        gate, up = self.gate_up(normed)
        return residual + _linear(self.down_proj, ops.silu_and_mul(gate, up))


def _linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, layer.weight, layer.bias)


def fused_layer_of(layer: nn.Module, head_dim: int) -> FusedLayer | None:
    """Makes the fused form of a layer; None if the kernels do not support a part of the layer, or if a user's hook is
    inside. ``head_dim`` is the head size if the attention module does not tell."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    submodules = [m for m in layer.modules() if m is not layer]
    # Hooks of the layer itself are allowed: they run around the original and the fused forward.
    if attention is None or mlp is None or any(map(is_modified, submodules)) or "forward" in vars(layer):
        return None
    projections = [getattr(attention, name, None) or getattr(mlp, name, None) for name in LINEAR_NAMES]
    linears = [x for x in projections if type(x) is nn.Linear]  # q, k, v, o, gate, up, down
    norm_modules: list[Any] = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    norm_modules += [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]
    norms = [norm for module in norm_modules if (norm := norm_of(module)) is not None]
    if len(linears) < len(projections) or len(norms) < len(norm_modules) or len(norm_modules) == 3:  # 3: q or k only
        return None
    parameters = list(layer.parameters())
    # Quantized and tensor-parallel weights are subclasses that wrap other tensors.
    is_plain = not any(hasattr(type(p), "__tensor_flatten__") for p in parameters)
    if not is_plain or len({(p.dtype, p.device) for p in parameters}) > 1:
        return None
    unsupported = [getattr(attention, name, None) for name in ("attn_logit_softcapping", "sinks", "sliding_window")]
    # Any other parameter belongs to a part that the kernels do not compute.
    supported = {id(p) for module in (*linears, *norm_modules) for p in module.parameters()}
    if {id(p) for p in parameters} != supported or any(x is not None for x in unsupported):
        return None
    (attn_norm, attn_eps), (mlp_norm, mlp_eps), *qk_norms = norms
    d = int(getattr(attention, "head_dim", head_dim))
    if len({eps for _, eps in qk_norms}) > 1 or any(weight.shape != (d,) for weight, _ in qk_norms):
        return None
    is_swiglu = uses_gelu(getattr(mlp, "act_fn", None)) is False
    if attn_norm.numel() > MAX_HIDDEN or norm_weight_offset(norm_modules) != 0 or not is_swiglu:
        return None
    return FusedLayer(
        attn_norm=attn_norm,
        attn_eps=attn_eps,
        mlp_norm=mlp_norm,
        mlp_eps=mlp_eps,
        qkv=MergedLinear(linears[:3]),
        o_proj=linears[3],
        gate_up=MergedLinear(linears[4:6]),
        down_proj=linears[6],
        q_norm=qk_norms[0][0] if qk_norms else None,
        k_norm=qk_norms[1][0] if qk_norms else None,
        qk_eps=qk_norms[0][1] if qk_norms else 0.0,
        head_dim=d,
        scale=float(getattr(attention, "scaling", d**-0.5)),
    )


class FusedLayerForward:
    """Replaces a layer's forward. Runs the kernels if ``context.fused``, else ``original``, transformers' forward."""

    def __init__(self, layer: FusedLayer, kinds: LayerKinds, index: int, original: Callable[..., Any]) -> None:
        self._layer, self.original = layer, original
        self._kv_layer, self._rope = kinds.cache_indices[index], kinds.kinds[kinds.kind_indices[index]].rope

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        context = kwargs["longdraft_attend"]
        if not context.fused:
            return self.original(hidden_states, *args, **kwargs)
        cos_sin = NO_ROTATION if self._rope is None else kwargs["position_embeddings"]
        cos, sin = (x.to(hidden_states) for x in cos_sin)
        return self._layer.run(hidden_states, (cos, sin), context, self._kv_layer)
