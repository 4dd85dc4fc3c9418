"""Converts gated DeltaNet layers (Qwen3-Next, Qwen3.5), and their inputs in a forward, for our CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.memory.recurrent import RecurrentLayerState
from longdraft.model.hosting import ForwardContext, recurrent_states
from longdraft.model.layers.layer_parts import (
    LINEAR_NAMES,
    LLAMA_NORMS,
    has_modified_parts,
    linear_weights_of,
    norm_of,
    norms_of,
    uses_gelu,
)
from longdraft.model.linear_attention.tree_paths import conv_input_indices, tree_orders
from longdraft.model.model_copy import names_in_forward
from longdraft.model.quant.stored import ArrangedLinear
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.native.delta import DeltaNetBatch, DeltaNetDims, DeltaNetSequence, GatedDeltaNetLayer
from longdraft.native.recurrent import RecurrentSequence, TreeOrder

# The mixer's linear layers in the order of :class:`GatedDeltaNetLayer`, where out_proj and the MLP's follow.
_MIXER_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def kernel_delta_layer(layer: nn.Module) -> GatedDeltaNetLayer | None:
    """Converts a decoder layer like Qwen3.5's for the kernels. Returns None if the kernels cannot compute the layer."""
    mixer, mlp = getattr(layer, "linear_attn", None), getattr(layer, "mlp", None)
    convolution = getattr(mixer, "conv1d", None)
    if mixer is None or not isinstance(convolution, nn.Conv1d) or has_modified_parts(layer, mixer):
        return None
    out_proj, head_order = _split_head_order(getattr(mixer, "out_proj", None), int(mixer.head_v_dim))
    mlp_linears = [getattr(mlp, name, None) for name in LINEAR_NAMES[4:]]
    projections = linear_weights_of([*(getattr(mixer, n, None) for n in _MIXER_PROJECTIONS), out_proj, *mlp_linears])
    norms = norms_of({name: getattr(layer, attribute, None) for name, attribute in LLAMA_NORMS.items()})
    out_norm, is_gelu = norm_of(getattr(mixer, "norm", None)), uses_gelu(getattr(mlp, "act_fn", None))
    if projections is None or norms is None or out_norm is None or is_gelu is None:
        return None
    layer_norms, weight_offset = norms
    num_v_heads, value_dim = mixer.A_log.shape[0], out_norm[0].shape[0]
    qk_size, key_dim = projections[0][0].shape[0] - num_v_heads * value_dim, int(mixer.head_k_dim)
    num_k_heads = qk_size // (2 * key_dim)  # in_proj_qkv has the outputs q, k and v
    # Some versions of transformers repeat queries and keys for all value heads, and cache the repeated ones.
    repeats_keys = "repeat_interleave" in names_in_forward(mixer)
    conv_weight, conv_bias = convolution.weight.detach()[:, 0].contiguous(), convolution.bias
    return GatedDeltaNetLayer(
        layer_norms | {"out_norm": out_norm},
        projections,
        (conv_weight, None if conv_bias is None else conv_bias.detach()),
        -mixer.A_log.detach().float().exp(),
        mixer.dt_bias.detach().float().contiguous(),
        DeltaNetDims(num_v_heads, num_k_heads, key_dim, value_dim, num_v_heads if repeats_keys else num_k_heads),
        head_order=head_order,
        gelu=is_gelu,
        norm_weight_offset=weight_offset,
    )


def _split_head_order(module: nn.Module | None, value_dim: int) -> tuple[nn.Module | None, torch.Tensor | None]:
    """Splits a linear layer whose inputs are permuted into a layer without permutation and the order of value heads.
    Returns the layer and None if nothing is permuted. Returns (None, None) if the permutation does more than reorder
    heads, so the kernels cannot compute it."""
    if not isinstance(module, ArrangedLinear) or module.places is None:
        return module, None
    inputs_by_head = module.places.view(-1, value_dim)  # for each column of the matrix, the input that it multiplies
    reorders_heads = bool((inputs_by_head % value_dim == torch.arange(value_dim, device="cpu")).all())
    if len(module.parts) > 1 or module.rows is not None or not reorders_heads:
        return None, None
    return module.parts[0], inputs_by_head[:, 0] // value_dim


@contextmanager
def delta_layer_inputs(ctx: ForwardContext, layers: Sequence[GatedDeltaNetLayer]) -> Iterator[DeltaNetBatch | None]:
    """Yields the inputs of a model's recurrent layers in a forward, which the kernels must compute inside the ``with``.

    Yields None if ``layers`` is empty. The kernels first apply the pending inputs (of committed tokens) to each
    sequence's state, so none are left."""
    if not layers:
        yield None
        return
    batch, states = ctx.batch, recurrent_states(ctx.store)
    states_by_layer = [[states.layer_state(slot, index) for slot in batch.slots] for index in range(len(layers))]
    inputs = [
        _sequence_inputs(layer, state, batch, order)
        for layer, sequence_states in zip(layers, states_by_layer, strict=True)
        for state, order in zip(sequence_states, tree_orders(batch), strict=True)
    ]
    yield DeltaNetBatch(inputs, conv_input_indices(batch, layers[0].conv_kernel_size))
    for state in (state for sequence_states in states_by_layer for state in sequence_states):
        state.checkpoint.pending_inputs = ()


def _sequence_inputs(
    layer: GatedDeltaNetLayer, state: RecurrentLayerState, batch: ForwardBatch, order: TreeOrder
) -> DeltaNetSequence:
    """Makes one sequence's inputs of one layer, and allocates the tensors to which the kernels write the new tokens."""
    state.begin_forward(is_prefill=False)
    allocated = _allocate_cached_inputs(layer.dims, batch.tree_len)
    conv_inputs, *recurrence_inputs = allocated
    if batch.tree_offset:  # an earlier forward computed the tree's first nodes, which are copied
        for new, old in zip(allocated, (state.conv_inputs[0], *state.recurrence_inputs), strict=True):
            new[: batch.tree_offset] = old[: batch.tree_offset]
    state.conv_inputs, state.recurrence_inputs = {0: conv_inputs}, tuple(recurrence_inputs)
    checkpoint = state.checkpoint
    assert checkpoint.recurrent_state is not None
    recurrence = RecurrentSequence(checkpoint.recurrent_state, checkpoint.pending_inputs, recurrence_inputs, order)
    return DeltaNetSequence(checkpoint.conv_states[0], conv_inputs, recurrence)


def _allocate_cached_inputs(dims: DeltaNetDims, num_tokens: int) -> list[torch.Tensor]:
    """Allocates a layer's inputs of ``num_tokens`` tokens, uninitialised: the convolution's, then the recurrence's."""
    num_elements = [num_tokens * torch.Size(size).numel() for size in dims.cached_shapes]
    parts = torch.empty(sum(num_elements), **CPU_FLOAT32).split(num_elements)
    return [part.view(num_tokens, *size) for part, size in zip(parts, dims.cached_shapes, strict=True)]
