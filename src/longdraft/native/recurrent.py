"""Rows of recurrent layers by our kernels. See recurrent.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longdraft.native.boundary import CPU_FLOAT32, address
from longdraft.native.header import STRUCTURES, Int64
from longdraft.native.library import Kernels

Convolution, SequenceOf = STRUCTURES["Convolution"], STRUCTURES["RecurrentSequence"]
# The tensors of :class:`RecurrentInputs`, or none for no rows.
Inputs = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class LinearRecurrence:
    """A recurrence whose state (heads, keys, values) decays, and gains the product of a key and a value in each row.

    Attributes:
        delta_rule: a value is first corrected by what the state has for its key (the delta rule).
        qk_l2norm: keys and queries are divided by their lengths.
        scale: of queries.
        a, bias, skip: (heads,) of Mamba-2: a step's decay, what is added to its size, and the part of a value that goes
            into its output; None for others.
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
        """decay_per_key: each key has a decay of its own."""
        return STRUCTURES["Recurrence"](
            *(
                num_v_heads,
                num_k_heads,
                head_k_dim,
                head_v_dim,
                self.delta_rule,
                self.qk_l2norm,
                decay_per_key,
                self.scale,
                1e-6,
            ),
            *(address(x, min_numel=num_v_heads) for x in (self.a, self.dt_bias, self.d_skip)),
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


class TreeOrder:
    """The rows of a tree that are computed.

    Args:
        parents: the parent of each row, -1 for the committed rows.
        order: the rows to compute, parents first.
        first: rows from here on have outputs.
    """

    def __init__(self, parents: Sequence[int], order: Sequence[int], first: int) -> None:
        behind = {parents[row] for row in order}
        self._alive = [(Int64 * len(x))(*x) for x in (parents, order, [row in behind for row in order])]
        self.first_output, self.fields = first, (*map(ctypes.addressof, self._alive), len(order), first)


class RecurrentSequence(NamedTuple):
    """The rows of one sequence.

    Attributes:
        state: (heads, keys, values), float32; the pending rows are taken into it.
        pending: committed rows that it lacks.
        rows: the rows of a tree.
    """

    state: torch.Tensor
    pending: Inputs
    inputs: Inputs
    order: TreeOrder

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
    histories: Sequence[tuple[torch.Tensor, torch.Tensor]],
    input_indices: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Convolves the rows of some sequences -> (B, T, channels). Tensors are float32 on the CPU.

    Args:
        weight, bias: (channels, inputs), (channels,).
        silu: apply SiLU to the results.
        histories: for each sequence the inputs before its rows (inputs - 1, channels), and those of rows.
        input_indices: for each sequence (T, inputs) int64: the inputs that a row sees, the oldest first, counted from the
            first one before the rows.
    """
    channels, size = weight.shape
    count = len(input_indices[0])
    out = torch.empty(len(histories), count, channels, **CPU_FLOAT32)
    weight = weight.contiguous()
    kind = Convolution(channels, size, address(weight), address(bias, min_numel=channels), silu)
    one = STRUCTURES["ConvolutionSequence"]
    sequences = (one * len(histories))(
        *(
            one(address(window), address(rows), address(seen, torch.long), count, address(out[i]))
            for i, ((window, rows), seen) in enumerate(zip(histories, input_indices, strict=True))
        )
    )
    kernels.call("convolve", kind, sequences, len(histories))
    return out


def run_recurrence(kernels: Kernels, recurrence: LinearRecurrence, trees: Sequence[RecurrentSequence]) -> torch.Tensor:
    """Computes the trees' rows; returns outputs (B, T, heads, values), where each has T rows from ``first_output`` on."""
    heads, keys, values = trees[0].state.shape
    rows, first = RecurrentInputs(*trees[0].inputs), trees[0].order.first_output  # type: ignore[arg-type]  # they are there
    kind = recurrence.struct(heads, rows.k.shape[1], keys, values, decay_per_key=rows.g.dim() == 3)
    out = torch.empty(len(trees), len(rows.v) - first, heads, values, **CPU_FLOAT32)
    sequences = (SequenceOf * len(trees))(*(tree.struct(own) for tree, own in zip(trees, out, strict=True)))
    kernels.call("recur", kind, sequences, len(trees))
    return out
