"""Gated DeltaNet layers (Qwen3-Next, Qwen3.5) for our CPU kernels: their weights, and a forward's inputs."""

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

# Submodules of transformers' layers, in :class:`GatedDeltaNetLayer`'s order, and its names of norms -> transformers'.
_MIXER_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_NORM_NAMES = {"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def kernel_delta_layer(layer: nn.Module) -> GatedDeltaNetLayer | None:
    """The kernels' layer for a decoder layer like Qwen3.5's; None if the kernels cannot compute this layer."""
    mixer, mlp = getattr(layer, "linear_attn", None), getattr(layer, "mlp", None)
    convolution = getattr(mixer, "conv1d", None)
    if mixer is None or not isinstance(convolution, nn.Conv1d) or not is_unmodified(layer, mixer):
        return None
    out_proj, head_order = _split_head_order(getattr(mixer, "out_proj", None), int(mixer.head_v_dim))
    mlp_linears = [getattr(mlp, name, None) for name in _MLP_PROJECTIONS]
    projections = linear_weights_of([*(getattr(mixer, n, None) for n in _MIXER_PROJECTIONS), out_proj, *mlp_linears])
    layer_norms = {name: getattr(layer, attribute, None) for name, attribute in _NORM_NAMES.items()}
    norms = norms_of(layer_norms | {"out_norm": getattr(mixer, "norm", None)})
    is_gelu = uses_gelu(getattr(mlp, "act_fn", None))
    offset = None if norms is None else norm_weight_offset(layer_norms.values())
    if projections is None or norms is None or is_gelu is None or offset is None:
        return None
    num_heads, value_dim = mixer.A_log.shape[0], norms["out_norm"][0].shape[0]
    qk_size, key_dim = projections[0][0].shape[0] - num_heads * value_dim, int(mixer.head_k_dim)
    num_k_heads = qk_size // (2 * key_dim)
    # Some versions of transformers repeat queries and keys for all value heads before the recurrence, and cache that.
    repeats_keys = "repeat_interleave" in names_in_forward(mixer)
    weight, bias = convolution.weight.detach()[:, 0].contiguous(), convolution.bias
    return GatedDeltaNetLayer(
        norms,
        projections,
        (weight, None if bias is None else bias.detach()),
        -mixer.A_log.detach().float().exp(),  # A (Mamba's name), by head
        mixer.dt_bias.detach().float().contiguous(),
        DeltaNetDims(num_heads, num_k_heads, key_dim, value_dim, num_heads if repeats_keys else num_k_heads),
        head_order=head_order,
        gelu=is_gelu,
        norm_weight_offset=offset,
    )


def _split_head_order(module: nn.Module | None, value_dim: int) -> tuple[nn.Module | None, torch.Tensor | None]:
    """Splits a linear layer with permuted inputs into a plain layer and the order of heads (None: not permuted).

    The plain layer is None if the permutation does more than reorder heads, which the kernels cannot compute."""
    if not isinstance(module, ArrangedLinear) or module.places is None:
        return module, None
    inputs_by_head = module.places.view(-1, value_dim)  # places: for each input of the plain layer its index in x
    reorders_heads = bool((inputs_by_head % value_dim == torch.arange(value_dim, device="cpu")).all())
    if len(module.parts) > 1 or module.rows is not None or not reorders_heads:
        return None, None
    return module.parts[0], inputs_by_head[:, 0] // value_dim


@contextmanager
def delta_layer_inputs(
    ctx: ForwardContext, layers: Sequence[GatedDeltaNetLayer], layer_indices: Sequence[int]
) -> Iterator[DeltaNetBatch | None]:
    """Yields a forward's inputs of recurrent layers, for the kernels to run inside the ``with``; None without layers.

    ``layer_indices`` are the layers' indices in the store's recurrent states. The kernels first advance each sequence's
    state by its pending (committed) tokens. So after the ``with`` nothing is pending."""
    if not layers:
        yield None
        return
    batch, offset, states = ctx.batch, ctx.batch.tree_offset, recurrent_states(ctx.store)
    tree_orders = [TreeOrder(parents, with_ancestors(parents, offset), offset) for parents in tree_parents(batch)]
    states_by_layer = [[states.layer_state(slot, index) for slot in batch.slots] for index in layer_indices]
    inputs = [
        _sequence_inputs(layer, state, batch, order)
        for layer, sequence_states in zip(layers, states_by_layer, strict=True)
        for state, order in zip(sequence_states, tree_orders, strict=True)
    ]
    yield DeltaNetBatch(inputs, conv_input_indices(batch, layers[0].conv_kernel_size))
    for state in (state for sequence_states in states_by_layer for state in sequence_states):
        state.checkpoint.pending_inputs = ()


def _sequence_inputs(
    layer: GatedDeltaNetLayer, state: RecurrentLayerState, batch: ForwardBatch, order: TreeOrder
) -> DeltaNetSequence:
    """One sequence's inputs of one layer. The kernels write the new tokens' inputs to memory allocated here."""
    state.begin_forward(is_prefill=False)
    conv_inputs, *recurrence_inputs = allocated = _allocate_cached_inputs(layer.dims, batch.tree_len)
    if batch.tree_offset:  # nodes of an earlier forward over this tree
        for new, old in zip(allocated, (state.conv_inputs[0], *state.recurrence_inputs), strict=True):
            new[: batch.tree_offset] = old[: batch.tree_offset]
    state.conv_inputs, state.recurrence_inputs = {0: conv_inputs}, tuple(recurrence_inputs)
    start = state.checkpoint
    assert start.recurrent_state is not None
    recurrence = RecurrentSequence(start.recurrent_state, start.pending_inputs, recurrence_inputs, order)
    return DeltaNetSequence(start.conv_states[0], conv_inputs, recurrence)


def _allocate_cached_inputs(dims: DeltaNetDims, num_tokens: int) -> list[torch.Tensor]:
    """Uninitialised tensors (num_tokens, ...) for a layer's convolution and recurrence inputs, in one allocation."""
    num_elements = [num_tokens * torch.Size(size).numel() for size in dims.cached_shapes]
    parts = torch.empty(sum(num_elements), **CPU_FLOAT32).split(num_elements)
    return [part.view(num_tokens, *size) for part, size in zip(parts, dims.cached_shapes, strict=True)]
