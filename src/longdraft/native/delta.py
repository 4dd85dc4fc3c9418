"""Structures of kernels.h for decoder layers with a gated DeltaNet (delta_net.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longdraft.native.boundary import address
from longdraft.native.recurrent import CausalConv, LinearRecurrence, RecurrentSequence, SequenceStruct
from longdraft.native.structures import StackLayer, make_struct, weight_fields


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
        names = ("qkv", "z", "b", "a", "o", "gate", "up", "down")
        fields = weight_fields(self.norms, names, self.projections, out_norm=dims.head_v_dim)
        num_k_heads, k_dim, v_dim = dims.cached_k_heads, dims.head_k_dim, dims.head_v_dim
        self.struct = make_struct(
            "GatedDeltaNetLayer", **fields, norm_offset=self.norm_weight_offset,
            conv=CausalConv(*weight.shape, address(weight), address(bias), silu=True),
            recurrence=rule.struct(dims.num_v_heads, num_k_heads, k_dim, v_dim, decay_per_key=False),
            neg_exp_a=address(self.neg_exp_a, min_numel=dims.num_v_heads),
            dt_bias=address(self.dt_bias, min_numel=dims.num_v_heads),
            head_order=address(self.head_order, torch.long, dims.num_v_heads),
            n_k_heads=dims.num_k_heads, hidden_size=self.hidden_size,
            intermediate_size=fields["gate"].n_out, gelu=self.gelu,
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
        self._keepalive = sequences, conv_indices
        self.struct = make_struct(
            "DeltaNetBatch", conv_indices=[address(x, torch.long) for x in conv_indices],
            conv_inputs=list(map(address, conv_inputs)), conv_states=list(map(address, conv_states)),
            sequences=(SequenceStruct * len(recurrences))(*(recurrence.struct() for recurrence in recurrences)),
        )  # fmt: skip
