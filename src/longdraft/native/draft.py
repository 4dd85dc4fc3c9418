"""Structures of a draft's level, as kernels.h declares them. Each keeps alive what it points to."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from longdraft.native.structures import Long, Matrix, Pointer, Weights

NORMS = ("norm", "joined_norm", "cross_norm", "mlp_norm", "final_norm")
PRODUCTS = ("q", "k", "v", "o", "cross_q", "cross_o", "gate", "up", "down", "head")


class _Draft(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in NORMS),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, Matrix) for name in PRODUCTS),
        *((name, Long) for name in ("hidden", "heads", "kv_heads", "d", "inner", "normed_residual")),
    ]


class _Nodes(ctypes.Structure):
    _fields_ = [
        *((name, Long) for name in ("sequences", "width")),
        *((name, Pointer) for name in ("counts", "slots", "x", "joined", "cos", "sin", "begins", "ends", "masks")),
        ("seen", Long),
        ("lengths", Pointer),
    ]


class DraftBlock:
    """A draft's block and head.

    Args:
        norms: weights (hidden,) of those of :data:`NORMS` that there are; ``joined_norm`` makes it EAGLE-3's.
        products: those of :data:`PRODUCTS` that there are.
        heads, kv_heads, d: query heads, KV heads, head size, a multiple of 16.
        eps: of the norms.
        normed_residual: whether what is joined with the tokens is added to the attention's output with its norm.

    Attributes:
        vocabulary: rows of the head.
    """

    def __init__(
        self,
        norms: Mapping[str, torch.Tensor],
        products: Mapping[str, Weights],
        heads: int,
        kv_heads: int,
        d: int,
        eps: float,
        normed_residual: bool = False,
    ) -> None:
        self._norms, self._products = norms, products  # kept alive: the structure points into them
        self.hidden, self.vocabulary = norms["norm"].shape[0], products["head"][0].shape[0]
        self.struct = _Draft(
            *(norms[name].data_ptr() if name in norms else None for name in NORMS),
            *(eps, d**-0.5),
            *(Matrix.of(products[name]) if name in products else Matrix() for name in PRODUCTS),
            *(self.hidden, heads, kv_heads, d, products["gate"][0].shape[0], normed_residual),
        )


class Nodes:
    """Rows of each of B sequences, of which the last W go on.

    Args:
        width: W.
        counts: of each sequence's rows, W or more.
        slots: of the sequences, in the draft's cache and in the target's store.
        x, joined: (rows, hidden) token embeddings, and what EAGLE-3 joins with them.
        cos, sin: (rows, d) at the rows' positions.
        begins, ends: of the draft's own keys, those [begin, end) that are seen; the rows' own are the last of them.
        mask: (B, W, S) bool: which of the last S of them a row sees; None: all.
        lengths: how many of the target's keys are seen; LongSpec alone.
    """

    def __init__(
        self,
        width: int,
        counts: Sequence[int],
        slots: Sequence[int],
        x: torch.Tensor,
        joined: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        begins: Sequence[int],
        ends: Sequence[int],
        mask: torch.Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.size = len(counts) * width
        tensors = [None if t is None else t.contiguous() for t in (x, joined, cos, sin, mask)]
        numbers = [None if n is None else (Long * len(n))(*n) for n in (counts, slots, begins, ends, lengths)]
        self._alive = tensors, numbers
        x_, joined_, cos_, sin_, masks = (None if t is None else t.data_ptr() for t in tensors)
        counts_, slots_, begins_, ends_, lengths_ = (None if n is None else ctypes.addressof(n) for n in numbers)
        self.struct = _Nodes(
            *(len(counts), width, counts_, slots_, x_, joined_, cos_, sin_, begins_, ends_, masks),
            *(0 if mask is None else mask.shape[-1], lengths_),
        )
