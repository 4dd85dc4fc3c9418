"""The rows of a forward as our kernels read them, for each kind of layer: where its keys and values lie, which of them
a row sees, and how its positions turn heads."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.attention.block import Block
from longdraft.memory.windows import WindowStates
from longdraft.model import hosting
from longdraft.model.layout import Place, layout_of
from longdraft.model.shared_parts import rotary_module
from longdraft.native import Rows
from longdraft.native.boundary import FLOATS
from longdraft.native.scaled import KeptRows
from longdraft.native.structures import CHUNK

CosSin = tuple[torch.Tensor, torch.Tensor]
# cos and sin of layers whose heads are not turned.
UNTURNED: CosSin = (torch.empty(1, 1, 0, **FLOATS), torch.empty(1, 1, 0, **FLOATS))
# The rotary embedding of a model that has one for all layers.
ONLY = ""


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
