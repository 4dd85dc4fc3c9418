"""The structures Matrix, KeysValues, Layer, Stack and Batch of kernels.h, made of tensors. Classes keep these alive."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from longdraft.native.boundary import address
from longdraft.native.header import STRUCTURES, Long, Pointer
from longdraft.native.scaled import FORMATS, KeptRows, Scaled
from longdraft.native.stored import Stored

# A matrix (out, in), in float32 or stored, and its bias.
Weights = tuple[torch.Tensor | Stored, torch.Tensor | None]


Matrix, Scoring, KeysValues = (STRUCTURES[name] for name in ("Matrix", "Scoring", "KeysValues"))


def matrix(weights: Weights, y: torch.Tensor | None = None, size: int | None = None) -> ctypes.Structure:
    """A matrix, its bias, and the place of its products.

    Args:
        size: of the rows that are multiplied with it; None if that was checked.
    """
    w, bias = weights
    if size not in (None, w.shape[1]):
        raise TypeError(f"rows of {size} numbers are multiplied with a matrix {tuple(w.shape)}")
    if isinstance(w, Stored):
        number, (place, row, int8) = w.number, w.place()
    else:
        number, (place, row, int8) = 0, (address(w, rows=True), w.stride(0) * w.itemsize, 0)
    return Matrix(place, address(bias, size=w.shape[0]), address(y), row, w.shape[0], 0, number, int8)


def keys_values(keys: KeptRows, values: KeptRows) -> ctypes.Structure:
    """keys, values: (layers, slots, kv_heads, capacity, d), both of a dtype of :data:`FORMATS`."""
    scales: tuple[int | None, int | None, int, int, int] = (None, None, 0, 0, 0)
    if isinstance(keys, Scaled) and isinstance(values, Scaled):
        layer, slot, head, _ = keys.scales.stride()
        scales = (address(keys.scales, rows=True), address(values.scales, rows=True), layer, slot, head)
        keys, values = keys.numbers, values.numbers
    assert isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
    k, v = keys.stride(), values.stride()
    if keys.shape != values.shape or (v[4] != 1 and values is not keys):
        raise TypeError(f"kernels take values by row, shaped like keys {keys.shape}; got {values.shape}, {v}")
    places = (address(x if x.stride(4) == 1 else x.mT, keys.dtype, rows=True) for x in (keys, values))
    return KeysValues(*places, k[0], v[0], *k[1:], *v[1:4], FORMATS[keys.dtype], *scales)


# Rows of a prompt above which the kernels compute attention chunk by chunk (MANY in layer.cpp).
CHUNK = 32

NORMS = ("norm", "mlp_norm", "attended_norm", "done_norm", "q_norm", "k_norm")


# The weight of a norm and its epsilon.
Norm = tuple[torch.Tensor, float]


Own = TypeVar("Own", bound="StackLayer")


class HasStructure(Protocol):
    """Keeps alive what its structure points to."""

    struct: ctypes.Structure


@dataclass(eq=False)
class StackLayer:
    """A layer of a :class:`DecoderStack`.

    Attributes:
        recurrent: it keeps a state in the place of keys and values.
        norms, products: as the kind of layer has them.
        struct: its structure, which points into them.
    """

    recurrent: ClassVar[bool]
    norms: Mapping[str, Norm]
    products: Sequence[Weights]
    struct: ctypes.Structure = field(init=False)

    @property
    def hidden(self) -> int:
        """The size of its rows."""
        return self.norms["norm"][0].shape[0]

    def changed(self: Own, change: Callable[[Weights], Weights]) -> Own:
        """The layer with other weights."""
        return replace(self, products=[change(product) for product in self.products])


@dataclass(eq=False)
class DecoderLayer(StackLayer):
    """A decoder layer of the Llama kind: RMS norm, attention with RoPE, RMS norm, gated MLP. Or of the Gemma kind, with
    norms behind the attention and the MLP too.

    Attributes:
        norms: name -> norm, for some of :data:`NORMS`: for the inputs of the attention ("norm") and the MLP, for their
            outputs ("attended_norm", "done_norm"), each (hidden,), and for each head's queries and keys (d,).
        products: q, k, v, o, gate, up and down projection. If q gives twice the heads' sizes, the second half of each
            head's numbers are gates, whose sigmoids multiply the attention's output.
        heads, kv_heads, d: query heads, KV heads, head size, a multiple of 16.
        scale: the softmax scale.
        softcap: of the attention's scores; None for no cap.
        sinks: (heads,) scores that join the softmax's denominator; None for none.
        gelu: True if the MLP's gate goes through GELU by tanh, False for SiLU.
        plus: added to the norms' weights: 1 in Gemma's.
    """

    recurrent = False
    heads: int
    kv_heads: int
    d: int
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    gelu: bool = False
    plus: float = 0.0

    def __post_init__(self) -> None:
        heads, d, products = self.heads, self.d, self.products
        self.sinks = None if self.sinks is None else self.sinks.detach().float().contiguous()
        own = [self.norms.get(name) for name in NORMS]
        self.struct = STRUCTURES["Layer"](
            *(address(n and n[0], size=size) for n, size in zip(own, (*[self.hidden] * 4, d, d), strict=True)),
            *(0.0 if n is None else n[1] for n in own),
            self.plus, Scoring(self.scale, self.softcap or 0.0, address(self.sinks, size=heads)),
            *map(matrix, products), self.hidden, heads, self.kv_heads, d, products[4][0].shape[0], self.gelu,
            products[0][0].shape[0] == 2 * heads * d,
        )  # fmt: skip


@dataclass(eq=False)
class DecoderStack:
    """Consecutive decoder layers, optionally with the final norm and the head.

    Attributes:
        kinds: for each layer the number of its kind: of the rows, keys and values that a call gives for it. None if
            all layers are of one kind.
        places: for each layer its place among the layers of these keys and values, or among the recurrent layers; None
            if it is the layer's number.
        softcap: of the logits; None for no cap.
        plus: added to the norm's weight.
    """

    layers: Sequence[StackLayer]
    norm: Norm | None = None
    head: Weights | None = None
    kinds: Sequence[int] | None = None
    places: Sequence[int] | None = None
    softcap: float | None = None
    plus: float = 0.0

    def __post_init__(self) -> None:
        layers, count, hidden = self.layers, len(self.layers), self.layers[0].hidden
        structures = [ctypes.addressof(layer.struct) for layer in layers]
        self._alive: list[ctypes.Array[Any]] = [
            (Pointer * count)(*(s if x.recurrent == kind else None for s, x in zip(structures, layers, strict=True)))
            for kind in (False, True)
        ]
        self._alive += [(Long * count)(*x) for x in (self.kinds or [0] * count, self.places or range(count))]
        weight, eps = (None, 0.0) if self.norm is None else (address(self.norm[0], size=hidden), self.norm[1])
        self.struct = STRUCTURES["Stack"](
            *map(ctypes.addressof, self._alive), count, hidden, weight, eps, self.plus, self.softcap or 0.0,
            Matrix() if self.head is None else matrix(self.head),
        )  # fmt: skip

    @property
    def vocabulary(self) -> int:
        """Rows of the head, or 0."""
        return 0 if self.head is None else self.head[0].shape[0]

    def changed(
        self, change: Callable[[Weights], Weights], of_head: Callable[[Weights], Weights] | None = None
    ) -> DecoderStack:
        """The layers and the head with other weights. ``of_head`` changes the head's; None to use ``change``."""
        head = None if self.head is None else (of_head or change)(self.head)
        return replace(self, layers=[layer.changed(change) for layer in self.layers], head=head)


@dataclass(eq=False)
class Rows:
    """The rows of one forward: T rows for each of B sequences, and the places of their keys and values.

    Attributes:
        cos, sin: (B, T, turned), RoPE of the first dimensions of a head; turned may be 0.
        slots, first, ends: B numbers each: slot in the store, row of the first new key, keys with the new ones.
        mask: (B, T, width) bool, True where a row sees one of the last keys; None if it sees all.
        prompt: True for causal rows of a prompt, without a mask.
        begins: (B, T) int32, the first rank that a row sees, as :meth:`Kernels.attend` counts; None if rows see their
            path from its start.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    slots: Sequence[int]
    first: Sequence[int]
    ends: Sequence[int]
    mask: torch.Tensor | None
    prompt: bool = False
    begins: torch.Tensor | None = None

    def __post_init__(self) -> None:
        sequences, size, turned = self.cos.shape
        numbers = [(Long * sequences)(*x) for x in (self.slots, self.first, self.ends)]
        mask = None if self.mask is None else self.mask.contiguous()
        begins = None if self.begins is None else self.begins.int().contiguous()
        cos, sin = self.cos.contiguous(), self.sin.contiguous()
        self._alive = cos, sin, numbers, mask, begins
        self.struct = STRUCTURES["Batch"](
            sequences, size, address(cos), address(sin, size=cos.numel()), turned,
            *(ctypes.addressof(x) for x in numbers), address(mask, torch.bool), address(begins, torch.int32),
            0 if mask is None else mask.shape[-1], self.prompt,
        )  # fmt: skip
