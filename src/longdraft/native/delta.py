"""Decoder layers with a gated DeltaNet by our kernels. See delta.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from longdraft.native.boundary import address
from longdraft.native.header import STRUCTURES, Pointer
from longdraft.native.recurrent import Convolution, LinearRecurrence, SequenceOf, numbers_of, rows_of
from longdraft.native.structures import Norm, Weights, matrix

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


class DeltaLayer:
    """A decoder layer: RMS norm, gated DeltaNet, RMS norm, gated MLP.

    Args:
        norms: "norm" and "mlp_norm" (hidden,), of the inputs; "out_norm" (values,), of each head's output.
        products: queries, keys and values in one; gates of the outputs; weights of the values; steps; output; gate, up
            and down projection of the MLP.
        convolution: weight (channels, inputs) and bias (channels,) or None.
        decay, bias: (heads,) -exp(A_log), and what is added to the steps.
        order: (heads,) int64, the heads in the order in which the output product has them; None for their own.
        gelu, plus: as of a :class:`~longdraft.native.DecoderLayer`; nothing is added to "out_norm".
    """

    recurrent: ClassVar[bool] = True

    def __init__(
        self,
        norms: Mapping[str, Norm],
        products: Sequence[Weights],
        convolution: tuple[torch.Tensor, torch.Tensor | None],
        decay: torch.Tensor,
        bias: torch.Tensor,
        sizes: DeltaSizes,
        *,
        order: torch.Tensor | None = None,
        gelu: bool = False,
        plus: float = 0.0,
    ) -> None:
        self.hidden, self.sizes, self._products = norms["norm"][0].shape[0], sizes, products
        self._others = norms, convolution, decay, bias, order, gelu, plus  # the structure points into them
        weight, of_weight = convolution
        self.inputs = weight.shape[1]
        rule = LinearRecurrence(corrected=True, normalised=True, scale=float(sizes.keys**-0.5))
        own = [norms[name] for name in _NORMS]
        self.struct = STRUCTURES["DeltaLayer"](
            *(address(norm) for norm, _ in own), *(eps for _, eps in own), plus, *map(matrix, products),
            Convolution(*weight.shape, address(weight), address(of_weight), True),
            rule.struct(sizes.heads, sizes.kept_heads, sizes.keys, sizes.values, by_key=False),
            *(address(x, size=sizes.heads) for x in (decay, bias)), address(order, torch.long, sizes.heads),
            sizes.key_heads, self.hidden, products[5][0].shape[0], gelu,
        )  # fmt: skip

    def changed(self, change: Callable[[Weights], Weights]) -> DeltaLayer:
        """The layer with other weights."""
        norms, convolution, decay, bias, order, gelu, plus = self._others
        products = [change(product) for product in self._products]
        return DeltaLayer(norms, products, convolution, decay, bias, self.sizes, order=order, gelu=gelu, plus=plus)


@dataclass(frozen=True)
class DeltaSequence:
    """One sequence's rows for one layer.

    Attributes:
        window: (inputs - 1, channels), the convolution's inputs before the rows.
        state: (heads, keys, values); the pending rows are taken into it.
        pending: committed rows that it lacks, as in :attr:`rows`; None for none.
        inputs: (rows, channels), of which the new ones are written.
        rows: query, key, value, log-decay and weight of all rows, of which the new ones are written.
    """

    window: torch.Tensor
    state: torch.Tensor
    pending: Sequence[torch.Tensor] | None
    inputs: torch.Tensor
    rows: Sequence[torch.Tensor]


class DeltaRows:
    """The rows of a forward for all recurrent layers of a stack.

    Args:
        layers: for each layer its part of each sequence.
        parents, orders: for each sequence the parent of each row, and the rows to compute, parents first.
        first: the first new row.
        places: for each sequence (T, inputs): the convolution's inputs that a new row sees.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[DeltaSequence]],
        parents: Sequence[Sequence[int]],
        orders: Sequence[Sequence[int]],
        first: int,
        places: Sequence[torch.Tensor],
    ) -> None:
        every = [sequence for layer in layers for sequence in layer]
        numbers = [numbers_of(*each) for each in zip(parents, orders, strict=True)]
        trees: list[list[int]] = [[ctypes.addressof(x) for x in each] for each in numbers]
        sequences = (SequenceOf * len(every))()
        for i, own in enumerate(every):
            tree = i % len(parents)
            sequences[i] = SequenceOf(
                *(address(own.state), rows_of(own.pending), rows_of(own.rows)),
                *(*trees[tree], len(orders[tree]), first, None),
            )
        tensors = [places, [each.inputs for each in every], [each.window for each in every]]
        kinds = torch.long, torch.float32, torch.float32
        pointers = [
            (Pointer * len(each))(*(address(x, kind) for x in each)) for each, kind in zip(tensors, kinds, strict=True)
        ]
        self._alive = every, numbers, sequences, tensors, pointers
        self.struct = STRUCTURES["DeltaRows"](*map(ctypes.addressof, pointers), sequences)
