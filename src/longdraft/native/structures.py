"""The structures of kernels.h: same fields, same order. Each keeps the tensors alive that it points to."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from longdraft.native.nibbled import Nibbled
from longdraft.native.rounded import Rounded
from longdraft.native.scaled import FORMATS, KeptRows, Scaled
from longdraft.native.stored import Stored

Long, Pointer = ctypes.c_int64, ctypes.c_void_p

# A matrix (out, in), in float32, stored or rounded, and its bias.
Weights = tuple[torch.Tensor | Stored | Rounded | Nibbled, torch.Tensor | None]


class Matrix(ctypes.Structure):
    """See kernels.h."""

    _fields_ = [
        *((name, Pointer) for name in ("w", "bias", "y")),
        *((name, Long) for name in ("w_row", "outs", "adds", "format", "int8")),
    ]

    @classmethod
    def of(cls, weights: Weights, y: torch.Tensor | None = None) -> Matrix:
        w, bias = weights
        data, number = (w.data, w.number) if isinstance(w, (Stored, Rounded, Nibbled)) else (w, 0)
        places = [None if x is None else x.data_ptr() for x in (data, bias, y)]
        int8 = isinstance(w, Stored) and w.int8
        return cls(*places, data.stride(0) * data.itemsize, w.shape[0], 0, number, int8)


# Rows of a prompt above which the kernels compute attention chunk by chunk (MANY in layer.cpp).
CHUNK = 32

_PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("norm", "second_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_float) for name in ("eps", "second_eps", "q_eps", "k_eps", "scale")),
        *((name, Matrix) for name in _PRODUCTS),
        *((name, Long) for name in ("hidden", "heads", "kv_heads", "d", "inner")),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, Long) for name in ("sequences", "size")),
        *((name, Pointer) for name in ("cos", "sin", "slots", "first", "ends", "masks")),
        *((name, Long) for name in ("width", "prompt")),
    ]


class _Stack(ctypes.Structure):
    _fields_ = [
        *(("layers", ctypes.POINTER(Pointer)), ("count", Long)),
        *(("norm", Pointer), ("eps", ctypes.c_float), ("head", Matrix)),
    ]


class KeysValues(ctypes.Structure):
    """See kernels.h."""

    _fields_ = [
        *((name, Pointer) for name in ("k", "v")),
        *((name, Long) for name in ("k_layer", "v_layer", "k_slot", "k_head", "k_row", "k_dim")),
        *((name, Long) for name in ("v_slot", "v_head", "v_row", "format")),
        *((name, Pointer) for name in ("k_scale", "v_scale")),
        *((name, Long) for name in ("scale_layer", "scale_slot", "scale_head")),
    ]

    @classmethod
    def of(cls, keys: KeptRows, values: KeptRows) -> KeysValues:
        """keys, values: (layers, slots, kv_heads, capacity, d), both of a dtype of :data:`FORMATS`."""
        scales: tuple[int | None, int | None, int, int, int] = (None, None, 0, 0, 0)
        if isinstance(keys, Scaled) and isinstance(values, Scaled):
            layer, slot, head, _ = keys.scales.stride()
            scales = (keys.scales.data_ptr(), values.scales.data_ptr(), layer, slot, head)
            keys, values = keys.numbers, values.numbers
        assert isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
        k, v = keys.stride(), values.stride()
        strides = (k[0], v[0], *k[1:], *v[1:4])
        return cls(keys.data_ptr(), values.data_ptr(), *strides, FORMATS.index(keys.dtype), *scales)


class Scoring(ctypes.Structure):
    """See kernels.h."""

    _fields_ = [("scale", ctypes.c_float), ("cap", ctypes.c_float), ("sinks", Pointer)]


# The weight of a norm and its epsilon.
Norm = tuple[torch.Tensor, float]


class DecoderLayer:
    """A decoder layer of the Llama kind: RMS norm, attention with RoPE, RMS norm, gated MLP with SiLU.

    Args:
        norms: for the layer's input and the MLP's (hidden,); for each head's queries and keys (d,), or None.
        products: q, k, v, o, gate, up and down projection.
        heads, kv_heads, d: query heads, KV heads, head size, a multiple of 16.
        scale: the softmax scale.
    """

    def __init__(
        self,
        norms: tuple[Norm, Norm, Norm | None, Norm | None],
        products: Sequence[Weights],
        heads: int,
        kv_heads: int,
        d: int,
        scale: float,
    ) -> None:
        self.heads, self.d = heads, d
        self._norms, self.products = norms, products  # the structure points into them
        self._sizes = heads, kv_heads, d, scale
        self.struct = _Layer(
            *(None if n is None else n[0].data_ptr() for n in norms), *(0.0 if n is None else n[1] for n in norms),
            scale, *map(Matrix.of, products), norms[0][0].shape[0], heads, kv_heads, d, products[4][0].shape[0],
        )  # fmt: skip

    def changed(self, change: Callable[[Weights], Weights]) -> DecoderLayer:
        """The layer with other weights."""
        return DecoderLayer(self._norms, [change(product) for product in self.products], *self._sizes)


class DecoderStack:
    """Consecutive decoder layers, optionally with the final norm and the head.

    Attributes:
        vocabulary: rows of the head, or 0.
    """

    def __init__(self, layers: Sequence[DecoderLayer], norm: Norm | None = None, head: Weights | None = None) -> None:
        self.layers = layers
        self.vocabulary = 0 if head is None else head[0].shape[0]
        places = (Pointer * len(layers))(*(ctypes.addressof(layer.struct) for layer in layers))
        self._norm, self._head, self._places = norm, head, places
        weight, eps = (None, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
        self.struct = _Stack(places, len(layers), weight, eps, Matrix() if head is None else Matrix.of(head))

    def changed(
        self, change: Callable[[Weights], Weights], of_head: Callable[[Weights], Weights] | None = None
    ) -> DecoderStack:
        """The layers and the head with other weights. ``of_head`` changes the head's; None to use ``change``."""
        head = None if self._head is None else (of_head or change)(self._head)
        return DecoderStack([layer.changed(change) for layer in self.layers], self._norm, head)


class Rows:
    """The rows of one forward: T rows for each of B sequences, and the places of their keys and values.

    Args:
        cos, sin: (B, T, d).
        slots, first, ends: B numbers each: slot in the store, row of the first new key, keys with the new ones.
        mask: (B, T, width) bool, True where a row sees one of the last keys; None if it sees all.
        prompt: True for causal rows of a prompt, without a mask.
    """

    def __init__(
        self,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: Sequence[int],
        first: Sequence[int],
        ends: Sequence[int],
        mask: torch.Tensor | None,
        prompt: bool = False,
    ) -> None:
        self.sequences, self.size = cos.shape[:2]
        numbers = [(Long * self.sequences)(*x) for x in (slots, first, ends)]
        mask = None if mask is None else mask.contiguous()
        self._alive = (cos := cos.contiguous(), sin := sin.contiguous(), numbers, mask)
        self.struct = _Batch(
            self.sequences, self.size, cos.data_ptr(), sin.data_ptr(), *(ctypes.addressof(x) for x in numbers),
            None if mask is None else mask.data_ptr(), 0 if mask is None else mask.shape[-1], prompt,
        )  # fmt: skip
