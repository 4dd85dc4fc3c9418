"""Reads the parts of decoder layers with a gated DeltaNet for our kernels, and the rows of a forward for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from longdraft.attention.block import Block
from longdraft.memory.recurrent import LayerSlot
from longdraft.model.hosting import Hosted
from longdraft.model.layer_parts import is_gelu, is_untouched, norms_of, plus_of, products_of
from longdraft.model.model_copy import words
from longdraft.model.recurrent import states_of
from longdraft.model.stored import ArrangedLinear
from longdraft.model.tree_paths import last_inputs, needed, parents_of
from longdraft.native.boundary import FLOATS
from longdraft.native.delta import DeltaLayer, DeltaRows, DeltaSequence, DeltaSizes
from longdraft.native.recurrent import RecurrentTree, RowOrder

_MIXER = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = {"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def delta_layer_of(layer: nn.Module) -> DeltaLayer | None:
    """A layer for our kernels, with the parts of Qwen3.5's; None if it is of another kind."""
    mixer, mlp = getattr(layer, "linear_attn", None), getattr(layer, "mlp", None)
    convolution = getattr(mixer, "conv1d", None)
    if mixer is None or not isinstance(convolution, nn.Conv1d) or not is_untouched(layer, mixer):
        return None
    last, order = _in_order(getattr(mixer, "out_proj", None), int(mixer.head_v_dim))
    modules = [*(getattr(mixer, n, None) for n in _MIXER), last, *(getattr(mlp, n, None) for n in _MLP)]
    products = products_of(modules)
    of_layer = {name: getattr(layer, theirs, None) for name, theirs in _NORMS.items()}
    norms, gelu = norms_of(of_layer | {"out_norm": getattr(mixer, "norm", None)}), is_gelu(getattr(mlp, "act_fn", None))
    if products is None or norms is None or gelu is None or (plus := plus_of(of_layer.values())) is None:
        return None
    heads, values = mixer.A_log.shape[0], norms["out_norm"][0].shape[0]
    mixed, keys = products[0][0].shape[0] - heads * values, int(mixer.head_k_dim)
    key_heads = mixed // (2 * keys)
    # Some versions of the mixer repeat queries and keys before they are kept.
    repeated = "repeat_interleave" in words(mixer)
    weight, bias = convolution.weight.detach()[:, 0].contiguous(), convolution.bias
    return DeltaLayer(
        norms,
        products,
        (weight, None if bias is None else bias.detach()),
        -mixer.A_log.detach().float().exp(),
        mixer.dt_bias.detach().float().contiguous(),
        DeltaSizes(heads, key_heads, keys, values, heads if repeated else key_heads),
        order=order,
        gelu=gelu,
        plus=plus,
    )


def _in_order(module: nn.Module | None, values: int) -> tuple[nn.Module | None, torch.Tensor | None]:
    """A product, and the order of heads in which it has its inputs; None for the heads' own."""
    if not isinstance(module, ArrangedLinear) or module.places is None:
        return module, None
    heads = module.places.view(-1, values)
    whole = bool((heads % values == torch.arange(values, device="cpu")).all())
    if len(module.parts) > 1 or module.rows is not None or not whole:
        return None, None
    return module.parts[0], heads[:, 0] // values


@contextmanager
def delta_rows(hosted: Hosted, layers: Sequence[DeltaLayer], numbers: Sequence[int]) -> Iterator[DeltaRows | None]:
    """The rows of a forward for recurrent layers, None without layers. Inside, the kernels compute them; behind it, the
    pending rows are in the states.

    Args:
        numbers: of the layers, as the store's states have them.
    """
    if not layers:
        yield None
        return
    block = hosted.block
    states = states_of(hosted.store)
    orders = [RowOrder(each, needed(each, block.offset), block.offset) for each in parents_of(block)]
    slots = [[states.layer(slot, number) for slot in block.slots] for number in numbers]
    found = [
        _begun(layer, slot, block, order)
        for layer, own in zip(layers, slots, strict=True)
        for slot, order in zip(own, orders, strict=True)
    ]
    yield DeltaRows(found, last_inputs(block, layers[0].inputs))
    for slot in (slot for own in slots for slot in own):
        slot.now.pending = ()


def _begun(layer: DeltaLayer, slot: LayerSlot, block: Block, order: RowOrder) -> DeltaSequence:
    """One sequence's rows, with room for the new ones."""
    slot.begin(prompt=False)
    inputs, *rows = _room(layer.sizes, block.width)
    if block.offset:
        for new, old in zip((inputs, *rows), (slot.inputs[0], *slot.rows), strict=True):
            new[: block.offset] = old[: block.offset]
    slot.inputs, slot.rows = {0: inputs}, tuple(rows)
    assert slot.now.state is not None
    return DeltaSequence(slot.now.windows[0], inputs, RecurrentTree(slot.now.state, slot.now.pending, rows, order))


def _room(sizes: DeltaSizes, rows: int) -> list[torch.Tensor]:
    """Memory for what is kept of some rows, in one piece."""
    counts = [rows * torch.Size(size).numel() for size in sizes.kept]
    parts = torch.empty(sum(counts), **FLOATS).split(counts)
    return [part.view(rows, *size) for part, size in zip(parts, sizes.kept, strict=True)]
