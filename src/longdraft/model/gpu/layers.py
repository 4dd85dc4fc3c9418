"""Fused decoder layers on a GPU: Triton kernels for norms, RoPE with the KV write, and SwiGLU.

In a verification, transformers' code of a layer launches about fifty kernels of one or two microseconds each. A fused
layer launches nine kernels besides attention. GEMMs are torch's, merged if the weights are (:mod:`.merged_linear`).
:mod:`longdraft.model.layers.fused` compares a fused layer with transformers' code before its first use.
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
from longdraft.model.layers.layer_parts import HEAD_NORMS, LINEAR_NAMES, LayerKinds, LayerSpec
from longdraft.model.rope import NO_ROTATION, CosSin

MAX_HIDDEN = 32768  # the largest row that a program of the norm kernel holds in registers
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ops = torch.ops.longdraft


def supports(model: PreTrainedModel) -> bool:
    """True if the kernels run on a model's device and dtype."""
    on_nvidia = model.device.type == "cuda" and torch.version.hip is None
    return on_nvidia and model.dtype in _DTYPES and custom_ops.triton_enabled()


class FusedLayer(NamedTuple):
    """A decoder layer of the Llama kind, with its projections for our kernels."""

    spec: LayerSpec
    qkv: MergedLinear
    o_proj: nn.Linear
    gate_up: MergedLinear
    down_proj: nn.Linear

    def run(self, x: torch.Tensor, cos_sin: CosSin, context: hosting.ForwardContext, kv_layer: int) -> torch.Tensor:
        """Maps x (batch_size, query_len, hidden_size) to the layer's output, a new tensor. ``cos_sin``: two tensors
        (batch_size or 1, query_len, rotary_dim). ``kv_layer`` is the layer's index in the KV store."""
        batch, norms, (keys, values) = context.batch, self.spec.norms, context.store.layer(kv_layer)
        (q_norm, _), (k_norm, qk_eps) = (norms.get(name, (None, 0.0)) for name in HEAD_NORMS)
        q, k, v = self.qkv(ops.rms_norm(x, *norms["norm"]))
        write_starts = batch.write_starts_t  # not None in CUDA graphs
        kv_location = (batch.prefix_lens_t, batch.tree_offset) if write_starts is None else (write_starts, 0)
        queries = ops.rope_and_write_kv(
            *(q, k, v, *cos_sin, q_norm, k_norm, qk_eps, keys, values, batch.slots_t, *kv_location)
        )
        if kv_layer in context.query_layers:
            context.queries[kv_layer] = queries
        context.num_attention_calls += 1
        attn_out = context.attend(queries, keys, values, batch, self.spec.scale).transpose(1, 2).flatten(2)
        residual, normed = ops.add_rms_norm(x, _linear(self.o_proj, attn_out), *norms["mlp_norm"])
        gate, up = self.gate_up(normed)
        return residual + _linear(self.down_proj, ops.silu_and_mul(gate, up))


def _linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, layer.weight, layer.bias)


def fused_layer_of(layer: nn.Module, head_dim: int) -> FusedLayer | None:
    """Makes the fused form of a layer; None if the kernels do not support a part of the layer, or if a user's hook is
    inside. ``head_dim`` is the head size if the attention module does not tell."""
    parameters = list(layer.parameters())
    # Quantized and tensor-parallel weights are subclasses that wrap other tensors.
    is_plain = not any(hasattr(type(p), "__tensor_flatten__") for p in parameters)
    if not is_plain or len({(p.dtype, p.device) for p in parameters}) > 1:
        return None
    spec = LayerSpec.from_layer(layer, head_dim)
    if spec is None or spec.is_gelu or spec.norm_weight_offset or spec.softcap is not None or spec.sinks is not None:
        return None
    linears = [x for x in spec.linears if type(x) is nn.Linear]  # q, k, v, o, gate, up, down
    has_window = getattr(layer.self_attn, "sliding_window", None) is not None
    # Any other parameter belongs to a part that the kernels do not compute.
    num_supported = len(spec.norms) + sum(1 if x.bias is None else 2 for x in linears)
    if len(linears) < len(LINEAR_NAMES) or has_window or len(parameters) != num_supported:
        return None
    qk_norms = [spec.norms[name] for name in HEAD_NORMS if name in spec.norms]
    if len(spec.norms) != 2 + len(qk_norms) or len(qk_norms) == 1 or spec.norms["norm"][0].numel() > MAX_HIDDEN:
        return None
    if len({eps for _, eps in qk_norms}) > 1 or any(weight.shape != (spec.head_dim,) for weight, _ in qk_norms):
        return None
    return FusedLayer(spec, MergedLinear(linears[:3]), linears[3], MergedLinear(linears[4:6]), linears[6])


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
