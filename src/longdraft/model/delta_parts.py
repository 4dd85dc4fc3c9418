"""Gated DeltaNet layers for our kernels: their weights, and their inputs in a forward."""

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

_MIXER_LINEARS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
_NORM_ATTRIBUTES = {"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def kernel_delta_layer(layer: nn.Module) -> GatedDeltaNetLayer | None:
    """The kernels' layer for a decoder layer like Qwen3.5's; None if it is of another kind."""
    mixer, mlp = getattr(layer, "linear_attn", None), getattr(layer, "mlp", None)
    convolution = getattr(mixer, "conv1d", None)
    if mixer is None or not isinstance(convolution, nn.Conv1d) or not is_unmodified(layer, mixer):
        return None
    out_proj, head_order = _with_head_order(getattr(mixer, "out_proj", None), int(mixer.head_v_dim))
    mlp_linears = [getattr(mlp, name, None) for name in _MLP_LINEARS]
    projections = linear_weights_of([*(getattr(mixer, n, None) for n in _MIXER_LINEARS), out_proj, *mlp_linears])
    layer_norms = {name: getattr(layer, attribute, None) for name, attribute in _NORM_ATTRIBUTES.items()}
    norms = norms_of(layer_norms | {"out_norm": getattr(mixer, "norm", None)})
    gelu = uses_gelu(getattr(mlp, "act_fn", None))
    offset = None if norms is None else norm_weight_offset(layer_norms.values())
    if projections is None or norms is None or gelu is None or offset is None:
        return None
    heads, value_dim = mixer.A_log.shape[0], norms["out_norm"][0].shape[0]
    qk_size, key_dim = projections[0][0].shape[0] - heads * value_dim, int(mixer.head_k_dim)
    key_heads = qk_size // (2 * key_dim)
    # Some versions of the mixer repeat queries and keys for all heads before the recurrence.
    repeated = "repeat_interleave" in names_in_forward(mixer)
    weight, bias = convolution.weight.detach()[:, 0].contiguous(), convolution.bias
    return GatedDeltaNetLayer(
        norms,
        projections,
        (weight, None if bias is None else bias.detach()),
        -mixer.A_log.detach().float().exp(),
        mixer.dt_bias.detach().float().contiguous(),
        DeltaNetDims(heads, key_heads, key_dim, value_dim, heads if repeated else key_heads),
        head_order=head_order,
        gelu=gelu,
        norm_weight_offset=offset,
    )


def _with_head_order(module: nn.Module | None, value_dim: int) -> tuple[nn.Module | None, torch.Tensor | None]:
    """A linear layer without its input permutation, and that permutation as an order of heads (None: unchanged)."""
    if not isinstance(module, ArrangedLinear) or module.places is None:
        return module, None
    heads = module.places.view(-1, value_dim)
    whole_heads = bool((heads % value_dim == torch.arange(value_dim, device="cpu")).all())
    if len(module.parts) > 1 or module.rows is not None or not whole_heads:
        return None, None
    return module.parts[0], heads[:, 0] // value_dim


@contextmanager
def delta_layer_inputs(
    ctx: ForwardContext, layers: Sequence[GatedDeltaNetLayer], layer_indices: Sequence[int]
) -> Iterator[DeltaNetBatch | None]:
    """Yields a forward's inputs of recurrent layers (``layer_indices`` in the store's states) for the kernels; or None.

    The kernels run inside the ``with``. After it the states include the pending tokens.
    """
    if not layers:
        yield None
        return
    batch, offset, states = ctx.batch, ctx.batch.tree_offset, recurrent_states(ctx.store)
    orders = [TreeOrder(parents, with_ancestors(parents, offset), offset) for parents in tree_parents(batch)]
    layer_states = [[states.layer_state(slot, index) for slot in batch.slots] for index in layer_indices]
    inputs = [
        _sequence_inputs(layer, state, batch, order)
        for layer, sequence_states in zip(layers, layer_states, strict=True)
        for state, order in zip(sequence_states, orders, strict=True)
    ]
    yield DeltaNetBatch(inputs, conv_input_indices(batch, layers[0].conv_kernel_size))
    for state in (state for sequence_states in layer_states for state in sequence_states):
        state.checkpoint.pending_inputs = ()


def _sequence_inputs(
    layer: GatedDeltaNetLayer, state: RecurrentLayerState, batch: ForwardBatch, order: TreeOrder
) -> DeltaNetSequence:
    """One sequence's inputs, with memory for those of the new tokens."""
    state.begin_forward(is_prefill=False)
    conv_inputs, *inputs = allocated = _allocate(layer.dims, batch.tree_len)
    if batch.tree_offset:
        for new, old in zip(allocated, (state.conv_inputs[0], *state.recurrence_inputs), strict=True):
            new[: batch.tree_offset] = old[: batch.tree_offset]
    state.conv_inputs, state.recurrence_inputs, start = {0: conv_inputs}, tuple(inputs), state.checkpoint
    assert start.recurrent_state is not None
    recurrence = RecurrentSequence(start.recurrent_state, start.pending_inputs, inputs, order)
    return DeltaNetSequence(start.conv_states[0], conv_inputs, recurrence)


def _allocate(dims: DeltaNetDims, num_tokens: int) -> list[torch.Tensor]:
    """The tensors that are cached for some tokens, in one contiguous allocation."""
    counts = [num_tokens * torch.Size(size).numel() for size in dims.cached_shapes]
    parts = torch.empty(sum(counts), **CPU_FLOAT32).split(counts)
    return [part.view(num_tokens, *size) for part, size in zip(parts, dims.cached_shapes, strict=True)]
