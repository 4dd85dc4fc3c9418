"""Reads the parts of decoder layers with a gated DeltaNet for our kernels, and the rows of a forward for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.memory.recurrent import RecurrentLayerState
from longdraft.model.hosting import ForwardContext
from longdraft.model.layer_parts import is_unmodified, linear_weights_of, norm_weight_offset, norms_of, uses_gelu
from longdraft.model.model_copy import names_in_forward
from longdraft.model.recurrent import recurrent_states
from longdraft.model.stored import ArrangedLinear
from longdraft.model.tree_paths import conv_input_indices, tree_parents, with_ancestors
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.native.delta import DeltaNetBatch, DeltaNetDims, DeltaNetSequence, GatedDeltaNetLayer
from longdraft.native.recurrent import RecurrentSequence, TreeOrder

_MIXER = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = {"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def kernel_delta_layer(layer: nn.Module) -> GatedDeltaNetLayer | None:
    """A layer for our kernels, with the parts of Qwen3.5's; None if it is of another kind."""
    mixer, mlp = getattr(layer, "linear_attn", None), getattr(layer, "mlp", None)
    convolution = getattr(mixer, "conv1d", None)
    if mixer is None or not isinstance(convolution, nn.Conv1d) or not is_unmodified(layer, mixer):
        return None
    last, order = _in_order(getattr(mixer, "out_proj", None), int(mixer.head_v_dim))
    modules = [*(getattr(mixer, n, None) for n in _MIXER), last, *(getattr(mlp, n, None) for n in _MLP)]
    products = linear_weights_of(modules)
    of_layer = {name: getattr(layer, theirs, None) for name, theirs in _NORMS.items()}
    norms, gelu = (
        norms_of(of_layer | {"out_norm": getattr(mixer, "norm", None)}),
        uses_gelu(getattr(mlp, "act_fn", None)),
    )
    if products is None or norms is None or gelu is None or (plus := norm_weight_offset(of_layer.values())) is None:
        return None
    heads, values = mixer.A_log.shape[0], norms["out_norm"][0].shape[0]
    mixed, keys = products[0][0].shape[0] - heads * values, int(mixer.head_k_dim)
    key_heads = mixed // (2 * keys)
    # Some versions of the mixer repeat queries and keys before they are kept.
    repeated = "repeat_interleave" in names_in_forward(mixer)
    weight, bias = convolution.weight.detach()[:, 0].contiguous(), convolution.bias
    return GatedDeltaNetLayer(
        norms,
        products,
        (weight, None if bias is None else bias.detach()),
        -mixer.A_log.detach().float().exp(),
        mixer.dt_bias.detach().float().contiguous(),
        DeltaNetDims(heads, key_heads, keys, values, heads if repeated else key_heads),
        head_order=order,
        gelu=gelu,
        norm_weight_offset=plus,
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
def delta_layer_inputs(
    hosted: ForwardContext, layers: Sequence[GatedDeltaNetLayer], layer_indices: Sequence[int]
) -> Iterator[DeltaNetBatch | None]:
    """The rows of a forward for recurrent layers, None without layers. Inside, the kernels compute them; behind it, the
    pending rows are in the states.

    Args:
        numbers: of the layers, as the store's states have them.
    """
    if not layers:
        yield None
        return
    block = hosted.batch
    states = recurrent_states(hosted.store)
    orders = [
        TreeOrder(each, with_ancestors(each, block.tree_offset), block.tree_offset) for each in tree_parents(block)
    ]
    slots = [[states.layer_state(slot, number) for slot in block.slots] for number in layer_indices]
    found = [
        _begun(layer, slot, block, order)
        for layer, own in zip(layers, slots, strict=True)
        for slot, order in zip(own, orders, strict=True)
    ]
    yield DeltaNetBatch(found, conv_input_indices(block, layers[0].conv_kernel_size))
    for slot in (slot for own in slots for slot in own):
        slot.checkpoint.pending_inputs = ()


def _begun(
    layer: GatedDeltaNetLayer, slot: RecurrentLayerState, block: ForwardBatch, order: TreeOrder
) -> DeltaNetSequence:
    """One sequence's rows, with room for the new ones."""
    slot.begin_forward(is_prefill=False)
    inputs, *rows = _room(layer.dims, block.tree_len)
    if block.tree_offset:
        for new, old in zip((inputs, *rows), (slot.conv_inputs[0], *slot.recurrence_inputs), strict=True):
            new[: block.tree_offset] = old[: block.tree_offset]
    slot.conv_inputs, slot.recurrence_inputs = {0: inputs}, tuple(rows)
    assert slot.checkpoint.recurrent_state is not None
    return DeltaNetSequence(
        slot.checkpoint.conv_states[0],
        inputs,
        RecurrentSequence(slot.checkpoint.recurrent_state, slot.checkpoint.pending_inputs, rows, order),
    )


def _room(sizes: DeltaNetDims, rows: int) -> list[torch.Tensor]:
    """Memory for what is kept of some rows, in one piece."""
    counts = [rows * torch.Size(size).numel() for size in sizes.cached_shapes]
    parts = torch.empty(sum(counts), **CPU_FLOAT32).split(counts)
    return [part.view(rows, *size) for part, size in zip(parts, sizes.cached_shapes, strict=True)]
