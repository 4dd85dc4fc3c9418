"""Decoder layers with a gated DeltaNet by our kernels. See delta.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longdraft.native.boundary import address
from longdraft.native.header import STRUCTURES, Pointer
from longdraft.native.recurrent import Convolution, LinearRecurrence, RecurrentTree, SequenceOf
from longdraft.native.structures import StackLayer, matrix

_NORMS = ("norm", "mlp_norm", "out_norm")


@dataclass(frozen=True)
class DeltaSizes:
    """Attributes:
    heads, key_heads: of values and outputs; of queries and keys.
    keys, values: a head's sizes.
    kept_heads: heads of the queries and keys that are kept of a row: key_heads, or heads if each is kept repeated.
    """

    heads: int
    key_heads: int
    keys: int
    values: int
    kept_heads: int

    @property
    def channels(self) -> int:
        """Numbers of a row that are convolved."""
        return 2 * self.key_heads * self.keys + self.heads * self.values

    @property
    def kept(self) -> list[tuple[int, ...]]:
        """Sizes of what is kept of a row: the convolution's inputs; query, key, value, log-decay, its weight."""
        of_keys = (self.kept_heads, self.keys)
        return [(self.channels,), of_keys, of_keys, (self.heads, self.values), (self.heads,), (self.heads,)]


@dataclass(eq=False)
class DeltaLayer(StackLayer):
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

    recurrent = True
    convolution: tuple[torch.Tensor, torch.Tensor | None]
    decay: torch.Tensor
    bias: torch.Tensor
    sizes: DeltaSizes
    order: torch.Tensor | None = None
    gelu: bool = False
    plus: float = 0.0

    def __post_init__(self) -> None:
        sizes, (weight, of_weight) = self.sizes, self.convolution
        rule = LinearRecurrence(corrected=True, normalised=True, scale=float(sizes.keys**-0.5))
        own = [self.norms[name] for name in _NORMS]
        self.struct = STRUCTURES["DeltaLayer"](
            *(address(norm) for norm, _ in own), *(eps for _, eps in own), self.plus, *map(matrix, self.products),
            Convolution(*weight.shape, address(weight), address(of_weight), True),
            rule.struct(sizes.heads, sizes.kept_heads, sizes.keys, sizes.values, by_key=False),
            *(address(x, size=sizes.heads) for x in (self.decay, self.bias)),
            address(self.order, torch.long, sizes.heads),
            sizes.key_heads, self.hidden, self.products[5][0].shape[0], self.gelu,
        )  # fmt: skip

    @property
    def inputs(self) -> int:
        """Inputs of the convolution that a row sees."""
        return self.convolution[0].shape[1]


class DeltaSequence(NamedTuple):
    """One sequence's rows for one layer.

    Attributes:
        window: (inputs - 1, channels), the convolution's inputs before the rows.
        inputs: (rows, channels), of which the new ones are written.
        tree: query, key, value, log-decay and weight of all rows, of which the new ones are written.
    """

    window: torch.Tensor
    inputs: torch.Tensor
    tree: RecurrentTree


class DeltaRows:
    """The rows of a forward for all recurrent layers of a stack.

    Args:
        sequences: for each layer one after the other its part of each sequence.
        places: for each sequence (T, inputs): the convolution's inputs that a new row sees.
    """

    def __init__(self, sequences: Sequence[DeltaSequence], places: Sequence[torch.Tensor]) -> None:
        windows, inputs, trees = zip(*sequences, strict=True)
        structures = (SequenceOf * len(trees))(*(tree.struct() for tree in trees))
        found = [[address(x, torch.long) for x in places], *(list(map(address, x)) for x in (inputs, windows))]
        pointers = [(Pointer * len(each))(*each) for each in found]
        self._alive = sequences, places, structures, pointers
        self.struct = STRUCTURES["DeltaRows"](*map(ctypes.addressof, pointers), structures)
