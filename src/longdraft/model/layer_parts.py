"""The parts of decoder layers and of a forward's rows that our kernels read: norms, products, activation, cap, sinks.

For each kind of layer that is where its keys and values lie, which of them a row sees, and how positions turn heads.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.memory.windows import WindowKVCache
from longdraft.model import hosting
from longdraft.model.called_functions import is_library_code
from longdraft.model.layout import KVLocation, decoder_config, layout_of
from longdraft.model.shared_parts import rotary_module
from longdraft.model.skinny_gemm import kernel_weights_of
from longdraft.native import AttentionMetadata, DecoderLayer
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.native.int8_kv import KVTensor
from longdraft.native.library import HEAD_DIM_MULTIPLE
from longdraft.native.structures import FEW_TOKENS, LinearWeights, Norm

LINEAR_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The kernels' name of a norm -> transformers' name. In a layer of the Gemma kind the norm after the attention is one of
# its output; in one of the Llama kind it is one of the MLP's input.
_LLAMA = {"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GEMMA = {
    "norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
CosSin = tuple[torch.Tensor, torch.Tensor]
# cos and sin of layers whose heads are not turned.
NO_ROTATION: CosSin = (torch.empty(1, 1, 0, **CPU_FLOAT32), torch.empty(1, 1, 0, **CPU_FLOAT32))
# The rotary embedding of a model that has one for all layers.
SINGLE_ROPE = ""


def kernel_layer(layer: nn.Module, head_dim: int) -> DecoderLayer | None:
    """A layer for our kernels; None if it is of another kind, or if the user has hooks inside it.

    Args:
        head_dim: where the attention does not say it.
    """
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or not is_unmodified(layer):
        return None
    products = linear_weights_of([getattr(attention, name, None) or getattr(mlp, name, None) for name in LINEAR_NAMES])
    names = _GEMMA if hasattr(layer, _GEMMA["mlp_norm"]) else _LLAMA
    of_layer = {name: getattr(layer, theirs, None) for name, theirs in names.items()}
    of_heads = {name: own for name in ("q_norm", "k_norm") if (own := getattr(attention, name, None)) is not None}
    norms = norms_of(of_layer | of_heads)
    gelu = uses_gelu(getattr(mlp, "act_fn", None))
    if products is None or norms is None or gelu is None:
        return None
    plus = norm_weight_offset((of_layer | of_heads).values())
    d = int(getattr(attention, "head_dim", head_dim))
    if plus is None or d % HEAD_DIM_MULTIPLE:
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
        norm_weight_offset=plus,
    )


def is_unmodified(layer: nn.Module, patched_part: nn.Module | None = None) -> bool:
    """True if a layer's parts are float32 on the CPU, contiguous, and without the user's hooks.

    Args:
        ours: a part whose forward is ours.
    """
    inside = [m for m in layer.modules() if m is not layer]
    # Hooks of the layer itself do no harm: they run around any forward.
    if (
        any(is_modified(m, m is patched_part) for m in inside)
        or "forward" in vars(layer)
        or not is_library_code(type(layer).forward)
    ):
        return False
    tensors = [t for m in inside for t in m.parameters(recurse=False)]
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def linear_weights_of(modules: Iterable[nn.Module | None]) -> list[LinearWeights] | None:
    """The weights of all products; None if one is missing or of another kind."""
    found = [None if module is None else kernel_weights_of(module) for module in modules]
    return None if None in found else [weights for weights in found if weights is not None]


def norms_of(modules: Mapping[str, nn.Module | None]) -> dict[str, Norm] | None:
    """All norms by name; None if one is missing or of another kind."""
    found = {name: norm for name, module in modules.items() if (norm := norm_of(module)) is not None}
    return found if len(found) == len(modules) else None


def final_norm_and_head(model: PreTrainedModel, layers: Iterable[nn.Module]) -> dict[str, Any] | None:
    """The final norm and the head, as a :class:`DecoderStack` takes them; None if they are of another kind, or if the
    user has hooks in the model."""
    decoder, head = hosting.decoder_of(model), model.get_output_embeddings()
    final = getattr(decoder, "norm", None)
    norm, weights = norm_of(final), kernel_weights_of(head)
    modules = [model, decoder, model.get_input_embeddings(), head, *decoder.children(), *layers]
    if norm is None or weights is None or any(map(is_modified, modules)):
        return None
    plus = norm_weight_offset([final])
    cap = getattr(decoder_config(model), "final_logit_softcapping", None)
    return None if plus is None else {"norm": norm, "head": weights, "plus": plus, "softcap": cap}


def norm_of(module: nn.Module | None) -> Norm | None:
    """Weight and epsilon of an RMSNorm; None if the module has none."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return None
    return weight.detach(), eps


@torch.inference_mode()
def norm_weight_offset(norms: Iterable[nn.Module | None]) -> float | None:
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
def uses_gelu(activation: nn.Module | None) -> bool | None:
    """True for GELU by tanh, False for SiLU, None for another function: by its values, as names differ."""
    if not isinstance(activation, nn.Module):
        return None
    x = torch.linspace(-6, 6, 101, **CPU_FLOAT32)
    for gelu, own in ((False, F.silu(x)), (True, F.gelu(x, approximate="tanh"))):
        if torch.allclose(activation(x), own, rtol=1e-5, atol=1e-6):
            return gelu
    return None


def is_modified(module: nn.Module, ours: bool = False) -> bool:
    """True if a module has hooks, a forward that replaces its class's and is not ``patched_part``, or a class of the user's."""
    replaced = ("forward" in vars(module) and not ours) or not is_library_code(type(module).forward)
    return bool(module._forward_hooks or module._forward_pre_hooks or replaced)


class LayerKind(NamedTuple):
    """Attributes:
    window: index of the layer's :class:`WindowKVCache`; None if it keeps rows of the whole text.
    rope: the kind of layer that the rotary embedding is told; ONLY if it is told none; None without positions.
    """

    window: int | None
    rope: str | None


class LayerKinds(NamedTuple):
    """The kinds of a model's layers.

    Attributes:
        kv_locations: where each decoder layer finds its rows; None for a recurrent layer.
        kind_indices: the number of each decoder layer's kind; 0 for a recurrent layer.
        kinds: the kinds.
        rotary: the rotary embedding.
    """

    kv_locations: tuple[KVLocation | None, ...]
    kind_indices: tuple[int, ...]
    kinds: tuple[LayerKind, ...]
    rotary: nn.Module

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerKinds | None:
        """None if layers do more than attend once, to rows of their own, or if there is no rotary embedding."""
        layers, layout, rotary = hosting.decoder_layers(model), layout_of(model), rotary_module(model)
        attends = [hasattr(layer, "self_attn") for layer in layers]
        if (
            rotary is None
            or sum(attends) != len(layout.locations)
            or len(layers) - sum(attends) != len(layout.recurrent)
        ):
            return None
        if not layout.locations or not all(place.writes_kv for place in layout.locations):
            return None
        typed = "layer_type" in inspect.signature(rotary.forward).parameters
        names = getattr(hosting.decoder_config(model), "layer_types", None) if typed else [SINGLE_ROPE] * len(layers)
        if names is None or len(names) < len(layers):
            return None
        turned = [bool(getattr(getattr(layer, "self_attn", None), "use_rope", True)) for layer in layers]
        rest = iter(layout.locations)
        places = [next(rest) if attending else None for attending in attends]
        found = [
            None if place is None else LayerKind(place.window, name if turn else None)
            for place, name, turn in zip(places, names, turned, strict=False)
        ]
        kinds = tuple(dict.fromkeys(kind for kind in found if kind is not None))
        numbers = tuple(0 if kind is None else kinds.index(kind) for kind in found)
        return cls(tuple(places), numbers, kinds, rotary)

    @property
    def cache_indices(self) -> list[int]:
        """For each layer its place among the layers of its keys and values, or among the recurrent layers."""
        recurrent = itertools.count()
        return [next(recurrent) if place is None else place.layer for place in self.kv_locations]

    def rotate(self, rope: str | None, x: torch.Tensor, positions: torch.Tensor | None) -> CosSin:
        """cos and sin (B, T, d or less) of a kind's positions."""
        if rope is None:
            return NO_ROTATION
        cos, sin = self.rotary(x, positions) if rope == SINGLE_ROPE else self.rotary(x, positions, rope)
        return cos, sin

    def kernel_inputs(
        self, store: Any, block: ForwardBatch, cos_sin: Sequence[CosSin]
    ) -> list[tuple[AttentionMetadata, KVTensor, KVTensor]]:
        """Rows, keys and values of each kind.

        Args:
            cos_sin: of each kind.
        """
        return [kernel_inputs_of(store, block, kind.window, own) for kind, own in zip(self.kinds, cos_sin, strict=True)]


def kernel_inputs_of(
    store: Any, block: ForwardBatch, window: int | None, cos_sin: CosSin
) -> tuple[AttentionMetadata, KVTensor, KVTensor]:
    """The rows of a block, and all keys and values of the layers of one kind."""
    kept = store
    if window is not None:
        kept = [states for states in store.states if isinstance(states, WindowKVCache)][window]
        block = kept.batch_in_buffer(block)
    mask, chunk = block.mask, block.is_prefill and block.mask is None and not block.tree_offset
    # A long piece of a prompt needs no mask, which would take the square of its length.
    if mask is None and block.tree_len > 1 and not (chunk and block.query_len > FEW_TOKENS):
        mask = block.tree_mask(0, torch.device("cpu")).expand(block.batch_size, -1, -1)
    cos, sin = (x.expand(block.batch_size, block.query_len, -1) for x in cos_sin)
    first = [n + block.tree_offset for n in block.prefix_lens]
    ends = [n + block.tree_len for n in block.prefix_lens]
    return (
        AttentionMetadata(cos, sin, block.slots, first, ends, mask, chunk, block.window_starts),
        kept.keys,
        kept.values,
    )
