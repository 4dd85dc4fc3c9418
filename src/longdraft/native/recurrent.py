"""Rows of recurrent layers by our kernels. See recurrent.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longdraft.native.boundary import FLOATS, address
from longdraft.native.header import STRUCTURES, Long
from longdraft.native.library import Kernels

Convolution, SequenceOf = STRUCTURES["Convolution"], STRUCTURES["RecurrentSequence"]
# The tensors of :class:`RecurrentInputs`, or none for no rows.
Inputs = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class LinearRecurrence:
    """A recurrence whose state (heads, keys, values) decays, and gains the product of a key and a value in each row.

    Attributes:
        corrected: a value is first corrected by what the state has for its key (the delta rule).
        normalised: keys and queries are divided by their lengths.
        scale: of queries.
        a, bias, skip: (heads,) of Mamba-2: a step's decay, what is added to its size, and the part of a value that goes
            into its output; None for others.
    """

    corrected: bool
    normalised: bool = False
    scale: float = 1.0
    a: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None

    def struct(self, heads: int, key_heads: int, keys: int, values: int, by_key: bool) -> ctypes.Structure:
        """by_key: each key has a decay of its own."""
        return STRUCTURES["Recurrence"](
            *(heads, key_heads, keys, values, self.corrected, self.normalised, by_key, self.scale, 1e-6),
            *(address(x, size=heads) for x in (self.a, self.bias, self.skip)),
        )


class RecurrentInputs(NamedTuple):
    """Inputs of some rows, contiguous.

    Attributes:
        q, k: (rows, key heads, keys).
        v: (rows, heads, values).
        g: logarithms of decays, (rows, heads) or (rows, heads, keys); of Mamba-2 a step's size (rows, heads).
        beta: (rows, heads) weights of the values; None for Mamba-2.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None


class RowOrder:
    """The rows of a tree that are computed.

    Args:
        parents: the parent of each row, -1 for the committed rows.
        order: the rows to compute, parents first.
        first: rows from here on have outputs.
    """

    def __init__(self, parents: Sequence[int], order: Sequence[int], first: int) -> None:
        behind = {parents[row] for row in order}
        self._alive = [(Long * len(x))(*x) for x in (parents, order, [row in behind for row in order])]
        self.first, self.fields = first, (*map(ctypes.addressof, self._alive), len(order), first)


class RecurrentTree(NamedTuple):
    """The rows of one sequence.

    Attributes:
        state: (heads, keys, values), float32; the pending rows are taken into it.
        pending: committed rows that it lacks.
        rows: the rows of a tree.
    """

    state: torch.Tensor
    pending: Inputs
    rows: Inputs
    order: RowOrder

    def struct(self, out: torch.Tensor | None = None) -> ctypes.Structure:
        """out: memory for the outputs."""
        return SequenceOf(address(self.state), *map(_rows, self[1:3]), *self.order.fields, address(out))


def _rows(inputs: Inputs) -> ctypes.Structure:
    count = len(inputs[0]) if inputs and inputs[0] is not None else 0
    return STRUCTURES["RecurrentRows"](count, *map(address, inputs))


def convolve(
    kernels: Kernels,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    places: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Convolves the rows of some sequences -> (B, T, channels). Tensors are float32 on the CPU.

    Args:
        weight, bias: (channels, inputs), (channels,).
        silu: apply SiLU to the results.
        inputs: for each sequence the inputs before its rows (inputs - 1, channels), and those of rows.
        places: for each sequence (T, inputs) int64: the inputs that a row sees, the oldest first, counted from the
            first one before the rows.
    """
    channels, size = weight.shape
    count = len(places[0])
    out = torch.empty(len(inputs), count, channels, **FLOATS)
    weight = weight.contiguous()
    kind = Convolution(channels, size, address(weight), address(bias, size=channels), silu)
    one = STRUCTURES["ConvolutionSequence"]
    sequences = (one * len(inputs))(
        *(
            one(address(window), address(rows), address(seen, torch.long), count, address(out[i]))
            for i, ((window, rows), seen) in enumerate(zip(inputs, places, strict=True))
        )
    )
    kernels.call("convolve", kind, sequences, len(inputs))
    return out


def recur(kernels: Kernels, recurrence: LinearRecurrence, trees: Sequence[RecurrentTree]) -> torch.Tensor:
    """Computes the trees' rows; returns outputs (B, T, heads, values), where each has T rows from ``first`` on."""
    heads, keys, values = trees[0].state.shape
    rows, first = RecurrentInputs(*trees[0].rows), trees[0].order.first  # type: ignore[arg-type]  # they are there
    kind = recurrence.struct(heads, rows.k.shape[1], keys, values, by_key=rows.g.dim() == 3)
    out = torch.empty(len(trees), len(rows.v) - first, heads, values, **FLOATS)
    sequences = (SequenceOf * len(trees))(*(tree.struct(own) for tree, own in zip(trees, out, strict=True)))
    kernels.call("recur", kind, sequences, len(trees))
    return out
