"""Structures of kernels.h for decoder layers with a gated DeltaNet (delta_net.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longdraft.native.boundary import address
from longdraft.native.header import STRUCTURES, Pointer
from longdraft.native.recurrent import CausalConv, LinearRecurrence, RecurrentSequence, SequenceStruct
from longdraft.native.structures import StackLayer, matrix_struct

_NORM_NAMES = ("norm", "mlp_norm", "out_norm")


@dataclass(frozen=True)
class DeltaNetDims:
    """Sizes of a gated DeltaNet, as transformers names them.

    Attributes:
        cached_k_heads: number of heads in the cached q and k: num_k_heads, or num_v_heads if the cache repeats heads.
    """

    num_v_heads: int
    num_k_heads: int
    head_k_dim: int
    head_v_dim: int
    cached_k_heads: int

    @property
    def conv_dim(self) -> int:
        """Number of the convolution's channels: those of q, k and v."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    @property
    def cached_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of what is cached for a token: the convolution's input, q, k, v, log decay, beta."""
        k_shape, v_shape = (self.cached_k_heads, self.head_k_dim), (self.num_v_heads, self.head_v_dim)
        return [(self.conv_dim,), k_shape, k_shape, v_shape, (self.num_v_heads,), (self.num_v_heads,)]


@dataclass(eq=False)
class GatedDeltaNetLayer(StackLayer):
    """A decoder layer: RMS norm, gated DeltaNet, RMS norm, gated MLP.

    Attributes:
        norms: "norm" and "mlp_norm" (hidden_size,); "out_norm" (head_v_dim,), applied to each head's output.
        projections: qkv, z, b, a and o (output) of the DeltaNet; gate, up and down of the MLP.
        conv, dims: weight (channels, kernel_size) and bias (channels,) or None of the convolution; sizes.
        neg_exp_a, dt_bias: (num_v_heads,): log decay = neg_exp_a * softplus(a + dt_bias), neg_exp_a = -exp(A_log).
        head_order: (num_v_heads,) int64, ids of the value heads in the order of o's input; None: ascending.
        gelu: True: the MLP's activation is GELU by tanh; False: SiLU.
        norm_weight_offset: added to the weights of "norm" and "mlp_norm".
    """

    is_recurrent = True
    conv: tuple[torch.Tensor, torch.Tensor | None]
    neg_exp_a: torch.Tensor
    dt_bias: torch.Tensor
    dims: DeltaNetDims
    head_order: torch.Tensor | None = None
    gelu: bool = False
    norm_weight_offset: float = 0.0

    def __post_init__(self) -> None:
        dims, (weight, bias) = self.dims, self.conv
        rule = LinearRecurrence(delta_rule=True, qk_l2norm=True, scale=float(dims.head_k_dim**-0.5))
        norms, (gate_weight, _) = [self.norms[name] for name in _NORM_NAMES], self.projections[5]
        self.struct = STRUCTURES["GatedDeltaNetLayer"](
            *(address(norm) for norm, _ in norms), *(eps for _, eps in norms), self.norm_weight_offset,
            *map(matrix_struct, self.projections), CausalConv(*weight.shape, address(weight), address(bias), True),
            rule.struct(dims.num_v_heads, dims.cached_k_heads, dims.head_k_dim, dims.head_v_dim, decay_per_key=False),
            *(address(x, min_numel=dims.num_v_heads) for x in (self.neg_exp_a, self.dt_bias)),
            address(self.head_order, torch.long, dims.num_v_heads),
            dims.num_k_heads, self.hidden_size, gate_weight.shape[0], self.gelu,
        )  # fmt: skip

    @property
    def conv_kernel_size(self) -> int:
        """Number of tokens whose inputs the convolution combines."""
        return self.conv[0].shape[1]


class DeltaNetSequence(NamedTuple):
    """The tokens of one sequence in one layer. The kernel writes the inputs of new tokens into these tensors.

    Attributes:
        conv_state: (kernel_size - 1, channels), inputs of the convolution for the last tokens before these.
        conv_inputs: (tokens, channels), inputs of the convolution for these tokens.
        recurrence: the recurrence's state, and q, k, v, log decay and beta of these tokens.
    """

    conv_state: torch.Tensor
    conv_inputs: torch.Tensor
    recurrence: RecurrentSequence


class DeltaNetBatch:
    """The tokens of a forward in all recurrent layers of a stack.

    Args:
        sequences: a DeltaNetSequence for each layer and sequence, layer by layer.
        conv_indices: for each sequence, ``input_indices`` of :func:`~.recurrent.convolve` (new tokens, kernel_size).
    """

    def __init__(self, sequences: Sequence[DeltaNetSequence], conv_indices: Sequence[torch.Tensor]) -> None:
        conv_states, conv_inputs, recurrences = zip(*sequences, strict=True)
        structures = (SequenceStruct * len(recurrences))(*(recurrence.struct() for recurrence in recurrences))
        addresses = [[address(x, torch.long) for x in conv_indices]]
        addresses += [list(map(address, x)) for x in (conv_inputs, conv_states)]
        pointers = [(Pointer * len(x))(*x) for x in addresses]
        self._keepalive = sequences, conv_indices, structures, pointers
        self.struct = STRUCTURES["DeltaNetBatch"](*map(ctypes.addressof, pointers), structures)
