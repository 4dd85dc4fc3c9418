"""Runs linear recurrences and causal convolutions of recurrent layers on trees of tokens (recurrent.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longdraft.native.boundary import CPU_FLOAT32, address
from longdraft.native.header import STRUCTURES, Int64
from longdraft.native.library import Kernels

CausalConv, SequenceStruct = STRUCTURES["CausalConv"], STRUCTURES["RecurrentSequence"]
# The fields of a :class:`RecurrentInputs`; empty if there are no tokens.
Inputs = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class LinearRecurrence:
    """A recurrence of a state S (head_k_dim, head_v_dim) for each head. A token with key k sets S to decay S + k u^T.

    Attributes:
        delta_rule: True: u = beta (v - (decay S)^T k), v minus what the state predicts for it; False: u = beta v.
        qk_l2norm: True: q and k are first divided by their L2 norms.
        scale: factor of q.
        a, dt_bias, d_skip: Mamba-2's A, dt_bias and D (num_v_heads,); None for other recurrences.
    """

    delta_rule: bool
    qk_l2norm: bool = False
    scale: float = 1.0
    a: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    d_skip: torch.Tensor | None = None

    def struct(
        self, num_v_heads: int, num_k_heads: int, head_k_dim: int, head_v_dim: int, decay_per_key: bool
    ) -> ctypes.Structure:
        """Returns a layer's structure. decay_per_key: True: a decay for each key dimension; False: for each head."""
        l2norm_eps = 1e-6  # as in transformers
        return STRUCTURES["LinearRecurrence"](
            n_v_heads=num_v_heads, n_k_heads=num_k_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim,
            delta_rule=self.delta_rule, qk_l2norm=self.qk_l2norm, decay_per_key=decay_per_key,
            scale=self.scale, eps=l2norm_eps, a=address(self.a, min_numel=num_v_heads),
            dt_bias=address(self.dt_bias, min_numel=num_v_heads), d_skip=address(self.d_skip, min_numel=num_v_heads),
        )  # fmt: skip


class RecurrentInputs(NamedTuple):
    """Inputs of consecutive tokens, as contiguous tensors.

    Attributes:
        q, k: queries and keys (tokens, num_k_heads, head_k_dim).
        v: values (tokens, num_v_heads, head_v_dim).
        g: log decay (tokens, num_v_heads) or (tokens, num_v_heads, head_k_dim); for Mamba-2 dt (tokens, num_v_heads).
        beta: weight of v (tokens, num_v_heads); None for Mamba-2.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None


class TreeOrder:
    """The order in which the tokens of a tree are computed.

    Args:
        parents: index of each token's parent; -1 for a token that starts from the committed state.
        order: indices of the tokens to compute, parents first.
        first_output: index of the first token that has an output; all tokens behind it have one too.
    """

    def __init__(self, parents: Sequence[int], order: Sequence[int], first_output: int) -> None:
        inner_nodes = {parents[token] for token in order}
        has_children = [token in inner_nodes for token in order]
        self._keepalive = [(Int64 * len(x))(*x) for x in (parents, order, has_children)]
        self.first_output = first_output
        # The fields of RecurrentSequence in kernels.h from `parents` to `first_output`.
        self.fields = (*map(ctypes.addressof, self._keepalive), len(order), first_output)


class RecurrentSequence(NamedTuple):
    """The state and the new tokens of one sequence.

    Attributes:
        state: the committed state (num_v_heads, head_k_dim, head_v_dim), to which the kernel adds the pending tokens.
        pending: inputs of the pending tokens: committed tokens that the state does not contain yet.
        inputs: inputs of a tree's tokens.
        order: the order in which the tree's tokens are computed.
    """

    state: torch.Tensor
    pending: Inputs
    inputs: Inputs
    order: TreeOrder

    def struct(self, out: torch.Tensor | None = None) -> ctypes.Structure:
        """Returns the structure RecurrentSequence of kernels.h. out: memory for the outputs; None: C++ sets it."""
        inputs = map(_inputs_struct, (self.pending, self.inputs))
        return SequenceStruct(address(self.state), *inputs, *self.order.fields, address(out))


def _inputs_struct(inputs: Inputs) -> ctypes.Structure:
    num_tokens = len(inputs[0]) if inputs and inputs[0] is not None else 0
    return STRUCTURES["RecurrentInputs"](num_tokens, *map(address, inputs))


def convolve(
    kernels: Kernels,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    histories: Sequence[tuple[torch.Tensor, torch.Tensor]],
    input_indices: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Convolves T tokens of each of B sequences (depthwise, causal); returns (B, T, channels).

    Args:
        weight, bias: (channels, kernel_size); (channels,) or None.
        silu: True: applies SiLU to the results.
        histories: for each sequence, the state (kernel_size - 1, channels), and the inputs of newer tokens.
        input_indices: for each sequence (T, kernel_size) int64: indices of each token's inputs in the concatenation of
            state and inputs, the oldest first.
    """
    channels, kernel_size = weight.shape
    num_tokens = len(input_indices[0])
    out = torch.empty(len(histories), num_tokens, channels, **CPU_FLOAT32)
    weight = weight.contiguous()
    conv = CausalConv(channels, kernel_size, address(weight), address(bias, min_numel=channels), silu)
    sequence = STRUCTURES["CausalConvSequence"]
    sequences = (sequence * len(histories))(
        *(
            sequence(address(state), address(inputs), address(indices, torch.long), num_tokens, address(out[i]))
            for i, ((state, inputs), indices) in enumerate(zip(histories, input_indices, strict=True))
        )
    )
    kernels.call("causal_conv", conv, sequences, len(histories))
    return out


def run_recurrence(kernels: Kernels, recurrence: LinearRecurrence, batch: Sequence[RecurrentSequence]) -> torch.Tensor:
    """Runs a recurrence on sequences whose trees have one size. Returns the outputs of each tree's tokens from
    ``first_output`` on, which is the same in all trees: (sequences, tokens, num_v_heads, head_v_dim)."""
    num_v_heads, head_k_dim, head_v_dim = batch[0].state.shape
    inputs, first = RecurrentInputs(*batch[0].inputs), batch[0].order.first_output  # type: ignore[arg-type]  # not None
    decay_per_key = inputs.g.dim() == 3
    struct = recurrence.struct(num_v_heads, inputs.k.shape[1], head_k_dim, head_v_dim, decay_per_key)
    out = torch.empty(len(batch), len(inputs.v) - first, num_v_heads, head_v_dim, **CPU_FLOAT32)
    sequences = (SequenceStruct * len(batch))(*(sequence.struct(y) for sequence, y in zip(batch, out, strict=True)))
    kernels.call("linear_recurrence", struct, sequences, len(batch))
    return out
