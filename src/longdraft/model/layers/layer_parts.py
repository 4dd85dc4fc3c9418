"""Converts decoder layers and a forward's batch into the inputs of our CPU kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.model.called_functions import is_library_code
from longdraft.model.hosting import window_cache
from longdraft.model.layers.skinny_gemm import is_dtensor, kernel_weights_of
from longdraft.model.layout import KVLayout, KVLocation
from longdraft.model.model_parts import decoder_config, decoder_layers, decoder_of
from longdraft.model.rope import NO_ROTATION, CosSin, rotary_module, takes_layer_type
from longdraft.native import AttentionMetadata, DecoderLayer
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.native.library import HEAD_DIM_MULTIPLE
from longdraft.native.quantized_kv import KVTensor
from longdraft.native.structures import FEW_TOKENS, LinearWeights, Norm

# The linear layers in the attention module and the MLP, in the kernels' order.
LINEAR_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The kernels' name of a norm -> transformers' attribute. "post_attention_layernorm" normalizes the attention's output
# in Gemma's layers, and the MLP's input in Llama's.
LLAMA_NORMS = {"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
# transformers' names and the kernels' names of norms of each head's queries and keys.
HEAD_NORMS = ("q_norm", "k_norm")
# LayerKind.rope if one rotary embedding serves all layers.
SINGLE_ROPE = ""


class LayerSpec(NamedTuple):
    """Parts and constants of a decoder layer like Llama's or Gemma's, for our kernels.

    Attributes:
        linears: the linear layers, as in LINEAR_NAMES.
        norms: weight and epsilon of each norm, by the kernels' names.
        norm_weight_offset: the number that norms add to their weights.
        is_gelu: True for GELU (tanh) in the MLP, False for SiLU."""

    linears: list[nn.Module | None]
    norms: dict[str, Norm]
    norm_weight_offset: float
    is_gelu: bool
    head_dim: int
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None

    @classmethod
    def from_layer(cls, layer: nn.Module, head_dim: int) -> LayerSpec | None:
        """Describes a layer. Returns None for another kind of layer, or if a user modified a part of it.
        ``head_dim``: head size of a layer without an attribute head_dim."""
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        if attention is None or has_modified_parts(layer):
            return None
        linears = [getattr(attention, name, None) or getattr(mlp, name, None) for name in LINEAR_NAMES]
        is_gelu = uses_gelu(getattr(mlp, "act_fn", None))
        if None in linears or is_gelu is None:
            return None
        attributes = GEMMA_NORMS if hasattr(layer, GEMMA_NORMS["mlp_norm"]) else LLAMA_NORMS
        norm_modules = {name: getattr(layer, attribute, None) for name, attribute in attributes.items()}
        norm_modules |= {name: norm for name in HEAD_NORMS if (norm := getattr(attention, name, None)) is not None}
        if (norms := norms_of(norm_modules)) is None:
            return None
        head_dim = int(getattr(attention, "head_dim", head_dim))
        return cls(
            linears,
            *norms,
            is_gelu,
            head_dim,
            scale=float(getattr(attention, "scaling", head_dim**-0.5)),
            softcap=getattr(attention, "attn_logit_softcapping", None),
            sinks=getattr(attention, "sinks", None),
        )


def kernel_layer(layer: nn.Module, head_dim: int) -> DecoderLayer | None:
    """Converts a decoder layer for the CPU kernels. Returns None if the kernels cannot compute the layer.
    ``head_dim``: as for :meth:`LayerSpec.from_layer`."""
    spec = LayerSpec.from_layer(layer, head_dim)
    projections = None if spec is None else linear_weights_of(spec.linears)
    if spec is None or projections is None or spec.head_dim % HEAD_DIM_MULTIPLE:
        return None
    (k_matrix, _), (o_matrix, _) = projections[1], projections[3]
    return DecoderLayer(
        spec.norms,
        projections,
        num_heads=o_matrix.shape[1] // spec.head_dim,  # q_proj may have further outputs, for gates
        num_kv_heads=k_matrix.shape[0] // spec.head_dim,
        head_dim=spec.head_dim,
        scale=spec.scale,
        softcap=spec.softcap,
        sinks=spec.sinks,
        gelu=spec.is_gelu,
        norm_weight_offset=spec.norm_weight_offset,
    )


def has_modified_parts(layer: nn.Module, patched_part: nn.Module | None = None) -> bool:
    """True if a user modified a submodule of a layer (:func:`is_modified`), or replaced the layer's own forward.
    ``patched_part`` is a submodule whose forward we replaced. Hooks of the layer itself are allowed: they still run."""
    if "forward" in vars(layer) or not is_library_code(type(layer).forward):
        return True
    return any(is_modified(module, module is patched_part) for module in layer.modules() if module is not layer)


def is_cpu_float32(layer: nn.Module) -> bool:
    """True if the parameters of a layer's submodules are contiguous float32 tensors on the CPU."""
    tensors = [t for module in layer.children() for t in module.parameters()]
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def linear_weights_of(modules: Iterable[nn.Module | None]) -> list[LinearWeights] | None:
    """Returns the weights of all linear layers; None if a layer is missing or unknown to the kernels."""
    all_weights = [None if module is None else kernel_weights_of(module) for module in modules]
    return None if None in all_weights else [weights for weights in all_weights if weights is not None]


@torch.inference_mode()
def norms_of(modules: Mapping[str, nn.Module | None]) -> tuple[dict[str, Norm], float] | None:
    """Returns name -> weight and epsilon of each norm, and the number that the norms add to their weights.
    That is 1 for Gemma's, else 0. Returns None if a norm is missing or lacks weight or epsilon, or if norms differ."""
    norms = {name: norm for name, module in modules.items() if (norm := norm_of(module)) is not None}
    if len(norms) < len(modules):
        return None
    offsets = set()
    for module, (weight, _) in zip(modules.values(), norms.values(), strict=True):
        assert module is not None
        # RMSNorm of ones gives weight + offset.
        normed = module(weight.new_ones(1, weight.numel()))[0]
        offsets.add(float((normed - weight - 1).abs().sum() < (normed - weight).abs().sum()))
    return (norms, offsets.pop()) if len(offsets) == 1 else None


def final_norm_and_head(model: PreTrainedModel, layers: Iterable[nn.Module]) -> dict[str, Any] | None:
    """Returns the arguments of :class:`DecoderStack` for the final norm and the head, as a dict.
    Returns None if the kernels cannot compute norm and head, or if a user modified a module of the model."""
    decoder, head = decoder_of(model), model.get_output_embeddings()
    modules = [model, decoder, model.get_input_embeddings(), head, *decoder.children(), *layers]
    weights = kernel_weights_of(head)
    if weights is None or any(map(is_modified, modules)):
        return None
    if (norms := norms_of({"norm": getattr(decoder, "norm", None)})) is None:
        return None
    softcap = getattr(decoder_config(model), "final_logit_softcapping", None)
    return {"norm": norms[0]["norm"], "head": weights, "norm_weight_offset": norms[1], "softcap": softcap}


def norm_of(module: nn.Module | None) -> Norm | None:
    """Returns weight and epsilon of an RMSNorm; None if the module lacks one of them, or the weight is sharded."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or is_dtensor(weight) or not isinstance(eps, float):
        return None
    return weight.detach(), eps


@torch.inference_mode()
def uses_gelu(activation: nn.Module | None) -> bool | None:
    """True for GELU (tanh), False for SiLU, None for another function. Compares outputs, as class names vary."""
    if not isinstance(activation, nn.Module):
        return None
    x = torch.linspace(-6, 6, 101, **CPU_FLOAT32)
    for gelu, expected in ((False, F.silu(x)), (True, F.gelu(x, approximate="tanh"))):
        if torch.allclose(activation(x), expected, rtol=1e-5, atol=1e-6):
            return gelu
    return None


def is_modified(module: nn.Module, is_patched: bool = False) -> bool:
    """True if a module has hooks, a user's class, or a replaced forward. ``is_patched``: we replaced the forward."""
    replaced = ("forward" in vars(module) and not is_patched) or not is_library_code(type(module).forward)
    return bool(module._forward_hooks or module._forward_pre_hooks or replaced)


class LayerKind(NamedTuple):
    """A kind of attention layer for the kernels: layers with the same window and the same cos and sin.

    Attributes:
        window_index: index of the layers' :class:`WindowKVCache` in the store; None for the full context.
        rope: the rotary embedding's ``layer_type`` argument; SINGLE_ROPE if it takes none; None without RoPE."""

    window_index: int | None
    rope: str | None


class LayerKinds(NamedTuple):
    """The kinds of a model's layers.

    Attributes:
        kv_locations: for each decoder layer, the location of its KV; None for a recurrent layer.
        kind_indices: for each decoder layer, the index of its kind in ``kinds``; 0 for a recurrent layer.
        kinds: the distinct kinds of attention layers.
        rotary: the model's rotary embedding."""

    kv_locations: tuple[KVLocation | None, ...]
    kind_indices: tuple[int, ...]
    kinds: tuple[LayerKind, ...]
    rotary: nn.Module

    @classmethod
    def from_model(cls, model: PreTrainedModel, layout: KVLayout) -> LayerKinds | None:
        """Finds the kinds. Returns None without rotary embedding, or if a layer attends twice or reads another's KV."""
        layers, rotary = decoder_layers(model), rotary_module(model)
        has_attention = [hasattr(layer, "self_attn") for layer in layers]
        num_attention, num_recurrent = sum(has_attention), len(layers) - sum(has_attention)
        if rotary is None or (num_attention, num_recurrent) != (len(layout.locations), len(layout.recurrent)):
            return None
        if not layout.locations or not all(location.writes_kv for location in layout.locations):
            return None
        layer_types = getattr(decoder_config(model), "layer_types", None)
        rope_types = layer_types if takes_layer_type(rotary) else [SINGLE_ROPE] * len(layers)
        if rope_types is None or len(rope_types) < len(layers):
            return None
        uses_rope = [bool(getattr(getattr(layer, "self_attn", None), "use_rope", True)) for layer in layers]
        remaining_locations = iter(layout.locations)
        locations = [next(remaining_locations) if attends else None for attends in has_attention]
        layer_kinds = [
            None if location is None else LayerKind(location.window_index, rope_type if is_rotated else None)
            for location, rope_type, is_rotated in zip(locations, rope_types, uses_rope, strict=False)
        ]
        kinds = tuple(dict.fromkeys(kind for kind in layer_kinds if kind is not None))
        indices = tuple(0 if kind is None else kinds.index(kind) for kind in layer_kinds)
        return cls(tuple(locations), indices, kinds, rotary)

    @property
    def cache_indices(self) -> list[int]:
        """For each decoder layer, the index in the cache of its KV; for a recurrent layer, among recurrent layers."""
        recurrent_index = itertools.count()
        return [next(recurrent_index) if location is None else location.layer for location in self.kv_locations]

    def cos_sin(self, rope: str | None, x: torch.Tensor, positions: torch.Tensor | None) -> CosSin:
        """Returns cos and sin at ``positions`` of layers with this :attr:`LayerKind.rope`, in x's dtype."""
        if rope is None:
            return NO_ROTATION
        cos, sin = self.rotary(x, positions) if rope == SINGLE_ROPE else self.rotary(x, positions, rope)
        return cos, sin

    def kernel_inputs(
        self, store: Any, batch: ForwardBatch, cos_sin: Sequence[CosSin]
    ) -> list[tuple[AttentionMetadata, KVTensor, KVTensor]]:
        """Returns the kernels' inputs for each kind. ``cos_sin`` has an entry for each kind."""
        pairs = zip(self.kinds, cos_sin, strict=True)
        return [_kernel_inputs_of_kind(store, batch, kind.window_index, kind_cos_sin) for kind, kind_cos_sin in pairs]


def _kernel_inputs_of_kind(
    store: Any, batch: ForwardBatch, window_index: int | None, cos_sin: CosSin
) -> tuple[AttentionMetadata, KVTensor, KVTensor]:
    """Returns the batch for the layers of one kind, and the keys and values of the cache that these layers read."""
    cache = store
    if window_index is not None:
        cache = window_cache(store, window_index)
        batch = cache.batch_in_buffer(batch)
    mask, is_prefill_chunk = batch.mask, batch.is_prefill and batch.mask is None and not batch.tree_offset
    # The kernels compute a long prefill chunk in a causal mode: a mask for it would take quadratic memory.
    if mask is None and batch.tree_len > 1 and not (is_prefill_chunk and batch.query_len > FEW_TOKENS):
        mask = batch.tree_mask(0, torch.device("cpu")).expand(batch.batch_size, -1, -1)
    cos, sin = (x.expand(batch.batch_size, batch.query_len, -1) for x in cos_sin)
    starts = [n + batch.tree_offset for n in batch.prefix_lens]
    ends = [n + batch.tree_len for n in batch.prefix_lens]
    window_starts = batch.window_starts
    if batch.num_first and batch.query_len <= FEW_TOKENS:
        window_starts = None  # a few tokens see everything
    metadata = AttentionMetadata(
        cos, sin, batch.slots, starts, ends, mask, is_prefill_chunk, window_starts, batch.num_first
    )
    return metadata, cache.keys, cache.values
