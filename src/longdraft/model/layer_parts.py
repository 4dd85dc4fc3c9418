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

from longdraft.attention.block import Block
from longdraft.memory.windows import WindowStates
from longdraft.model import hosting
from longdraft.model.code import is_known
from longdraft.model.few_rows import weights_of
from longdraft.model.layout import Place, decoder_config, layout_of
from longdraft.model.shared_parts import rotary_module
from longdraft.native import DecoderLayer, Rows
from longdraft.native.boundary import FLOATS
from longdraft.native.library import HEAD_UNIT
from longdraft.native.scaled import KeptRows
from longdraft.native.structures import CHUNK, Norm, Weights

PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The kernels' name of a norm -> transformers' name. In a layer of the Gemma kind the norm after the attention is one of
# its output; in one of the Llama kind it is one of the MLP's input.
_LLAMA = {"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GEMMA = {
    "norm": "input_layernorm",
    "attended_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "done_norm": "post_feedforward_layernorm",
}
CosSin = tuple[torch.Tensor, torch.Tensor]
# cos and sin of layers whose heads are not turned.
UNTURNED: CosSin = (torch.empty(1, 1, 0, **FLOATS), torch.empty(1, 1, 0, **FLOATS))
# The rotary embedding of a model that has one for all layers.
ONLY = ""


def layer_of(layer: nn.Module, head_dim: int) -> DecoderLayer | None:
    """A layer for our kernels; None if it is of another kind, or if the user has hooks inside it.

    Args:
        head_dim: where the attention does not say it.
    """
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or not is_untouched(layer):
        return None
    products = products_of([getattr(attention, name, None) or getattr(mlp, name, None) for name in PRODUCTS])
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


class Kind(NamedTuple):
    """Attributes:
    window: index of the layer's :class:`WindowStates`; None if it keeps rows of the whole text.
    rope: the kind of layer that the rotary embedding is told; ONLY if it is told none; None without positions.
    """

    window: int | None
    rope: str | None


class LayerKinds(NamedTuple):
    """The kinds of a model's layers.

    Attributes:
        places: where each decoder layer finds its rows; None for a recurrent layer.
        numbers: the number of each decoder layer's kind; 0 for a recurrent layer.
        of_layers: the kinds.
        rotary: the rotary embedding.
    """

    places: tuple[Place | None, ...]
    numbers: tuple[int, ...]
    of_layers: tuple[Kind, ...]
    rotary: nn.Module

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerKinds | None:
        """None if layers do more than attend once, to rows of their own, or if there is no rotary embedding."""
        layers, layout, rotary = hosting.decoder_layers(model), layout_of(model), rotary_module(model)
        attends = [hasattr(layer, "self_attn") for layer in layers]
        if rotary is None or sum(attends) != len(layout.places) or len(layers) - sum(attends) != len(layout.recurrent):
            return None
        if not layout.places or not all(place.writes for place in layout.places):
            return None
        typed = "layer_type" in inspect.signature(rotary.forward).parameters
        names = getattr(hosting.decoder_config(model), "layer_types", None) if typed else [ONLY] * len(layers)
        if names is None or len(names) < len(layers):
            return None
        turned = [bool(getattr(getattr(layer, "self_attn", None), "use_rope", True)) for layer in layers]
        rest = iter(layout.places)
        places = [next(rest) if attending else None for attending in attends]
        found = [
            None if place is None else Kind(place.window, name if turn else None)
            for place, name, turn in zip(places, names, turned, strict=False)
        ]
        kinds = tuple(dict.fromkeys(kind for kind in found if kind is not None))
        numbers = tuple(0 if kind is None else kinds.index(kind) for kind in found)
        return cls(tuple(places), numbers, kinds, rotary)

    @property
    def of_stack(self) -> list[int]:
        """For each layer its place among the layers of its keys and values, or among the recurrent layers."""
        recurrent = itertools.count()
        return [next(recurrent) if place is None else place.layer for place in self.places]

    def rotate(self, rope: str | None, x: torch.Tensor, positions: torch.Tensor | None) -> CosSin:
        """cos and sin (B, T, d or less) of a kind's positions."""
        if rope is None:
            return UNTURNED
        cos, sin = self.rotary(x, positions) if rope == ONLY else self.rotary(x, positions, rope)
        return cos, sin

    def rows(self, store: Any, block: Block, cos_sin: Sequence[CosSin]) -> list[tuple[Rows, KeptRows, KeptRows]]:
        """Rows, keys and values of each kind.

        Args:
            cos_sin: of each kind.
        """
        return [rows_of(store, block, kind.window, own) for kind, own in zip(self.of_layers, cos_sin, strict=True)]


def rows_of(store: Any, block: Block, window: int | None, cos_sin: CosSin) -> tuple[Rows, KeptRows, KeptRows]:
    """The rows of a block, and all keys and values of the layers of one kind."""
    kept = store
    if window is not None:
        kept = [states for states in store.states if isinstance(states, WindowStates)][window]
        block = kept.placed(block)
    mask, chunk = block.mask, block.prompt and block.mask is None and not block.offset
    # A long piece of a prompt needs no mask, which would take the square of its length.
    if mask is None and block.width > 1 and not (chunk and block.size > CHUNK):
        mask = block.block_mask(0, torch.device("cpu")).expand(block.batch, -1, -1)
    cos, sin = (x.expand(block.batch, block.size, -1) for x in cos_sin)
    first = [n + block.offset for n in block.lengths]
    ends = [n + block.width for n in block.lengths]
    return Rows(cos, sin, block.slots, first, ends, mask, chunk, block.begins), kept.keys, kept.values
