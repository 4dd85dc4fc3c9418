"""Decoder layers with a gated DeltaNet by our kernels. See delta.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longdraft.native.boundary import address
from longdraft.native.header import STRUCTURES, Pointer
from longdraft.native.recurrent import Convolution, LinearRecurrence, RecurrentSequence, SequenceOf
from longdraft.native.structures import StackLayer, matrix_struct

_NORMS = ("norm", "mlp_norm", "out_norm")


@dataclass(frozen=True)
class DeltaNetDims:
    """Attributes:
    heads, num_k_heads: of values and outputs; of queries and keys.
    keys, values: a head's sizes.
    cached_k_heads: heads of the queries and keys that are kept of a row: num_k_heads, or heads if each is kept repeated.
    """

    num_v_heads: int
    num_k_heads: int
    head_k_dim: int
    head_v_dim: int
    cached_k_heads: int

    @property
    def conv_dim(self) -> int:
        """Numbers of a row that are convolved."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    @property
    def cached_shapes(self) -> list[tuple[int, ...]]:
        """Sizes of what is kept of a row: the convolution's inputs; query, key, value, log-decay, its weight."""
        of_keys = (self.cached_k_heads, self.head_k_dim)
        return [
            (self.conv_dim,),
            of_keys,
            of_keys,
            (self.num_v_heads, self.head_v_dim),
            (self.num_v_heads,),
            (self.num_v_heads,),
        ]


@dataclass(eq=False)
class GatedDeltaNetLayer(StackLayer):
    """A decoder layer: RMS norm, gated DeltaNet, RMS norm, gated MLP.

    Attributes:
        norms: "norm" and "mlp_norm" (hidden,), of the inputs; "out_norm" (values,), of each head's output.
        products: queries, keys and values in one; gates of the outputs; weights of the values; steps; output; gate, up
            and down projection of the MLP.
        convolution: weight (channels, inputs) and bias (channels,) or None.
        decay, bias: (heads,) -exp(A_log), and what is added to the steps.
        order: (heads,) int64, the heads in the order in which the output product has them; None for their own.
        gelu, plus: as of a :class:`~longdraft.native.DecoderLayer`; nothing is added to "out_norm".
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
        sizes, (weight, of_weight) = self.dims, self.conv
        rule = LinearRecurrence(delta_rule=True, qk_l2norm=True, scale=float(sizes.head_k_dim**-0.5))
        own = [self.norms[name] for name in _NORMS]
        self.struct = STRUCTURES["DeltaLayer"](
            *(address(norm) for norm, _ in own), *(eps for _, eps in own), self.norm_weight_offset, *map(matrix_struct, self.projections),
            Convolution(*weight.shape, address(weight), address(of_weight), True),
            rule.struct(sizes.num_v_heads, sizes.cached_k_heads, sizes.head_k_dim, sizes.head_v_dim, decay_per_key=False),
            *(address(x, min_numel=sizes.num_v_heads) for x in (self.neg_exp_a, self.dt_bias)),
            address(self.head_order, torch.long, sizes.num_v_heads),
            sizes.num_k_heads, self.hidden_size, self.projections[5][0].shape[0], self.gelu,
        )  # fmt: skip

    @property
    def conv_kernel_size(self) -> int:
        """Inputs of the convolution that a row sees."""
        return self.conv[0].shape[1]


class DeltaNetSequence(NamedTuple):
    """One sequence's rows for one layer.

    Attributes:
        window: (inputs - 1, channels), the convolution's inputs before the rows.
        inputs: (rows, channels), of which the new ones are written.
        tree: query, key, value, log-decay and weight of all rows, of which the new ones are written.
    """

    conv_state: torch.Tensor
    conv_inputs: torch.Tensor
    recurrence: RecurrentSequence


class DeltaNetBatch:
    """The rows of a forward for all recurrent layers of a stack.

    Args:
        sequences: for each layer one after the other its part of each sequence.
        places: for each sequence (T, inputs): the convolution's inputs that a new row sees.
    """

    def __init__(self, sequences: Sequence[DeltaNetSequence], conv_indices: Sequence[torch.Tensor]) -> None:
        windows, inputs, trees = zip(*sequences, strict=True)
        structures = (SequenceOf * len(trees))(*(tree.struct() for tree in trees))
        found = [[address(x, torch.long) for x in conv_indices], *(list(map(address, x)) for x in (inputs, windows))]
        pointers = [(Pointer * len(each))(*each) for each in found]
        self._alive = sequences, conv_indices, structures, pointers
        self.struct = STRUCTURES["DeltaRows"](*map(ctypes.addressof, pointers), structures)
