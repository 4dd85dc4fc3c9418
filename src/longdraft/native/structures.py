"""The structures of kernels.h, filled from tensors: same fields, same order. Each keeps alive what it points to."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from longdraft.native.rounded import Rounded
from longdraft.native.stored import Stored

Long, Pointer = ctypes.c_int64, ctypes.c_void_p

# A matrix (out, in), in float32, as it is stored, or rounded, and its bias.
Weights = tuple[torch.Tensor | Stored | Rounded, torch.Tensor | None]


class Matrix(ctypes.Structure):
    """See kernels.h."""

    _fields_ = [
        *((name, Pointer) for name in ("w", "bias", "y")),
        *((name, Long) for name in ("w_row", "outs", "adds", "format")),
    ]

    @classmethod
    def of(cls, weights: Weights, y: torch.Tensor | None = None) -> Matrix:
        w, bias = weights
        data, number = (w.data, w.number) if isinstance(w, (Stored, Rounded)) else (w, 0)
        places = [None if x is None else x.data_ptr() for x in (data, bias, y)]
        return cls(*places, data.stride(0) * data.itemsize, w.shape[0], 0, number)


_PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("norm", "second_norm")),
        *((name, ctypes.c_float) for name in ("eps", "second_eps", "scale")),
        *((name, Matrix) for name in _PRODUCTS),
        *((name, Long) for name in ("hidden", "heads", "kv_heads", "d", "inner")),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, Long) for name in ("sequences", "size")),
        *((name, Pointer) for name in ("cos", "sin", "slots", "first", "ends", "masks")),
        ("width", Long),
    ]


class KeysValues(ctypes.Structure):
    """See kernels.h."""

    _fields_ = [
        *((name, Pointer) for name in ("k", "v")),
        *((name, Long) for name in ("k_slot", "k_head", "k_row", "k_dim", "v_slot", "v_head", "v_row")),
    ]

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """keys, values: (slots, kv_heads, capacity, d)."""
        return cls(keys.data_ptr(), values.data_ptr(), *keys.stride(), *values.stride()[:3])


class DecoderLayer:
    """A decoder layer of the Llama kind: RMS norm, attention with RoPE, RMS norm, gated MLP with SiLU.

    Args:
        norms: weight (hidden,) and epsilon of each.
        products: q, k, v, o, gate, up and down projection.
        heads, kv_heads, d: query heads, KV heads, head size, a multiple of 16.
        scale: of the scores.
    """

    def __init__(
        self,
        norms: Sequence[tuple[torch.Tensor, float]],
        products: Sequence[Weights],
        heads: int,
        kv_heads: int,
        d: int,
        scale: float,
    ) -> None:
        self.heads, self.d = heads, d
        self._norms, self._products = norms, products  # kept alive: the structure points into them
        (first, eps), (second, second_eps) = norms
        self.struct = _Layer(
            first.data_ptr(), second.data_ptr(), eps, second_eps, scale, *map(Matrix.of, products),
            first.shape[0], heads, kv_heads, d, products[4][0].shape[0],
        )  # fmt: skip


class Rows:
    """The rows of one forward: T of each of B sequences, and where their keys and values belong.

    Args:
        cos, sin: (B, T, d).
        slots, first, ends: B numbers each: slot in the store, row of the first new key, keys with the new ones.
        mask: (B, T, width) bool: which of its last keys a row sees; None: all.
    """

    def __init__(
        self,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: Sequence[int],
        first: Sequence[int],
        ends: Sequence[int],
        mask: torch.Tensor | None,
    ) -> None:
        self.sequences, self.size = cos.shape[:2]
        numbers = [(Long * self.sequences)(*x) for x in (slots, first, ends)]
        mask = None if mask is None else mask.contiguous()
        self._alive = (cos := cos.contiguous(), sin := sin.contiguous(), numbers, mask)
        self.struct = _Batch(
            self.sequences, self.size, cos.data_ptr(), sin.data_ptr(), *(ctypes.addressof(x) for x in numbers),
            None if mask is None else mask.data_ptr(), 0 if mask is None else mask.shape[-1],
        )  # fmt: skip
