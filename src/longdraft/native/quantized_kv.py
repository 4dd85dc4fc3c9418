"""KV caches in int8 and int4, which behave like tensors wherever entries are read and written.

An entry is a head's key or value of one token. It is quantized by itself, so that its bits do not depend on the other
tokens of a forward, and quantizing a dequantized entry changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from longdraft.native.header import CONSTANTS, ENUMS

if TYPE_CHECKING:
    from typing_extensions import Self

# torch dtype of a KV cache that kernels can read -> its number in the enumeration KVDtype.
KV_DTYPE_IDS = {getattr(torch, name.lower()): number for name, number in ENUMS["KVDtype"].items()}
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's annotations lack it
# In int4: pairs of numbers of a key that stay in eight bits, and pairs of numbers that share a scale.
SLOW_PAIRS, GROUP_PAIRS = CONSTANTS["INT4_SLOW_PAIRS"], CONSTANTS["INT4_GROUP_PAIRS"]
GROUP_SCALE_BYTES, SLOW_SCALE_BYTES = 2, 3  # the upper bytes of a float32


class QuantizedKV:
    """Stands in for a tensor (..., entries, head_dim) of keys or values. Supports a tensor's indexing and copying.

    Attributes:
        dtype: the name of the format, as a dtype.
        shape: (..., entries, head_dim).
        tensors: the numbers and scales, as the format has them.
    """

    dtype: ClassVar[torch.dtype]
    shape: torch.Size

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.device, self.stride = tensors[0].device, tensors[0].stride

    def _with_tensors(self, *tensors: torch.Tensor) -> Self:
        """Returns an object of the same format with other entries."""
        return type(self)(*tensors)

    def _quantize_like(self, x: torch.Tensor) -> Self:
        """Quantizes floats (..., entries, head_dim) to this format."""
        raise NotImplementedError

    def _indices(self, index: Any) -> Iterator[Any]:
        """Yields an index of the entries as an index of each tensor."""
        raise NotImplementedError

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns a dequantized tensor."""
        raise NotImplementedError

    def to_bytes(self) -> torch.Tensor:
        """Returns the entries with their scales as a tensor (..., entries, bytes), uint8."""
        raise NotImplementedError

    def _from_bytes(self, data: torch.Tensor) -> Self:
        """Returns the entries whose :meth:`to_bytes` is ``data``."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Self:
        return self._with_tensors(*(x[i] for x, i in zip(self.tensors, self._indices(index), strict=True)))

    def __setitem__(self, index: Any, entries: torch.Tensor | QuantizedKV) -> None:
        """Writes entries: floats, quantized ones, or what :meth:`to_bytes` of the same format returned."""
        if isinstance(entries, torch.Tensor) and entries.dtype == torch.uint8:
            entries = self._from_bytes(entries)
        elif not isinstance(entries, type(self)):
            entries = self._quantize_like(entries if isinstance(entries, torch.Tensor) else entries.to(torch.float32))
        for x, new, i in zip(self.tensors, entries.tensors, self._indices(index), strict=True):
            x[i] = new

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Applies a function that moves entries to each tensor (..., entries, size). It keeps the last dimension."""
        return self._with_tensors(*map(fn, self.tensors))

    def index_select(self, dim: int, index: torch.Tensor) -> Self:
        """Does Tensor.index_select(); ``dim`` must be neither negative nor the last dimension."""
        return self.map(lambda x: x.index_select(dim, index))

    def transpose(self, first: int, second: int) -> Self:
        """Does Tensor.transpose(); neither dimension may be negative or the last."""
        return self.map(lambda x: x.transpose(first, second))

    def data_ptr(self) -> int:
        return self.tensors[0].data_ptr()

    def zero_(self) -> Self:
        return self.map(torch.Tensor.zero_)


class Int8KV(QuantizedKV):
    """Keys or values in int8. An entry is scale * quants, where scale = the entry's largest magnitude / 127. The last
    dimension can be indexed by slices only, because a part of an entry keeps the entry's scale.

    Args:
        quants: the quantized numbers (..., entries, head_dim), int8.
        scales: the scale of each entry (..., entries), float32.
    """

    dtype = torch.int8

    def __init__(self, quants: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__(quants, scales)
        self.quants, self.scales, self.shape = quants, scales, quants.shape

    @classmethod
    def quantize(cls, x: torch.Tensor) -> Int8KV:
        """Quantizes floats (..., entries, head_dim). A NaN or infinite number makes its scale not finite."""
        x = x.float()
        scales = _divide_by_127(x.abs().amax(-1))
        tiny = torch.finfo(torch.float32).tiny  # avoids 0 / 0 in entries of zeros
        return cls((x / scales.clamp_min(tiny)[..., None]).round_().to(torch.int8), scales)

    def _quantize_like(self, x: torch.Tensor) -> Int8KV:
        return self.quantize(x)

    def _indices(self, index: Any) -> Iterator[Any]:
        yield index
        has_last = isinstance(index, tuple) and len(index) == self.quants.ndim
        yield index[:-1] if has_last else index  # scales have no last dimension

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.quants * self.scales[..., None]).to(dtype)

    def to_bytes(self) -> torch.Tensor:
        return torch.cat([self.quants.view(torch.uint8), self.scales[..., None].contiguous().view(torch.uint8)], -1)

    def _from_bytes(self, data: torch.Tensor) -> Int8KV:
        quants, scales = data.tensor_split([self.shape[-1]], -1)
        return Int8KV(quants.view(torch.int8), scales.contiguous().view(torch.float32)[..., 0])


class Int4Layout:
    """Numbers of pairs, ``half`` in all, ``packed`` in four and ``slow_pairs`` in eight bits; and the first byte of the
    groups' scales and of the slow pairs' scale."""

    def __init__(self, head_dim: int, is_keys: bool) -> None:
        self.half, self.slow_pairs = head_dim // 2, min(SLOW_PAIRS, head_dim // 4) if is_keys else 0
        self.packed = self.half - self.slow_pairs
        self.group_scales = self.packed + 2 * self.slow_pairs
        self.slow_scale = self.group_scales + GROUP_SCALE_BYTES * -(-self.packed // GROUP_PAIRS)


class Int4KV(QuantizedKV):
    """Keys or values in about four bits, in the format of native/int4_kv.h.

    Args:
        data: the bytes of each entry (..., entries, bytes), uint8.
        head_dim: d.
        is_keys: True for keys, whose slowest pairs are in eight bits.
    """

    dtype = INT4

    def __init__(self, data: torch.Tensor, head_dim: int, is_keys: bool) -> None:
        super().__init__(data)
        self.data, self.head_dim, self.is_keys = data, head_dim, is_keys
        self.shape = torch.Size((*data.shape[:-1], head_dim))

    @staticmethod
    def bytes_of(head_dim: int, is_keys: bool) -> int:
        """Returns the bytes of an entry."""
        layout = Int4Layout(head_dim, is_keys)
        return layout.slow_scale + (SLOW_SCALE_BYTES if layout.slow_pairs else 0)

    @classmethod
    def quantize(cls, x: torch.Tensor, is_keys: bool) -> Int4KV:
        """Quantizes floats (..., entries, d) with an even d. A NaN or infinite number makes its scale not finite."""
        x, head_dim = x.float(), x.shape[-1]
        layout = Int4Layout(head_dim, is_keys)
        half, packed = layout.half, layout.packed
        # (..., 2, groups, pairs); zeros beyond the last pair change no scale.
        groups = torch.stack([x[..., :packed], x[..., half : half + packed]], -2)
        groups = torch.nn.functional.pad(groups, (0, -packed % GROUP_PAIRS)).unflatten(-1, (-1, GROUP_PAIRS))
        largest, smallest = groups.amax((-3, -1)), groups.amin((-3, -1))
        scale = _cut_scale(torch.where(largest >= -smallest, largest, smallest) / -8, GROUP_SCALE_BYTES)
        group_codes = (_divide(groups, scale[..., None, :, None]).clamp_(-8, 7) + 8).to(torch.uint8)
        low, high = group_codes.flatten(-2)[..., :packed].unbind(-2)
        codes, scales = [low | high << 4], [_scale_bytes(scale, GROUP_SCALE_BYTES)]
        if layout.slow_pairs:
            slow = torch.cat([x[..., packed:half], x[..., half + packed :]], -1)
            scale = _cut_scale(_divide_by_127(slow.abs().amax(-1, keepdim=True)), SLOW_SCALE_BYTES)
            codes.append(_divide(slow, scale).clamp_(-127, 127).to(torch.int8).view(torch.uint8))
            scales.append(_scale_bytes(scale, SLOW_SCALE_BYTES))
        return cls(torch.cat([*codes, *scales], -1), head_dim, is_keys)

    def _with_tensors(self, *tensors: torch.Tensor) -> Int4KV:
        return Int4KV(tensors[0], self.head_dim, self.is_keys)

    def _quantize_like(self, x: torch.Tensor) -> Int4KV:
        return self.quantize(x, self.is_keys)

    def _indices(self, index: Any) -> Iterator[Any]:
        if isinstance(index, tuple) and len(index) == self.data.ndim and index[-1] != slice(None):
            raise IndexError("entries in int4 are read and written as a whole")
        yield index

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        layout = Int4Layout(self.head_dim, self.is_keys)
        packed, slow_pairs = layout.packed, layout.slow_pairs
        parts = self.data.tensor_split([packed, layout.group_scales, layout.slow_scale], -1)
        codes, slow, group_scales, slow_scale = (part.contiguous() for part in parts)
        pair_scales = _read_scales(group_scales, GROUP_SCALE_BYTES).repeat_interleave(GROUP_PAIRS, -1)[..., :packed]
        low, high = ((x.float() - 8) * pair_scales for x in (codes & 15, codes >> 4))
        if not slow_pairs:
            return torch.cat([low, high], -1).to(dtype)
        slow_numbers = slow.view(torch.int8) * _read_scales(slow_scale, SLOW_SCALE_BYTES)
        return torch.cat([low, slow_numbers[..., :slow_pairs], high, slow_numbers[..., slow_pairs:]], -1).to(dtype)

    def to_bytes(self) -> torch.Tensor:
        return self.data

    def _from_bytes(self, data: torch.Tensor) -> Int4KV:
        return self._with_tensors(data)


def _divide_by_127(x: torch.Tensor) -> torch.Tensor:
    """Returns x / 127, with the same bits on all devices."""
    # The divisor is a tensor, because on a GPU torch replaces division by a Python number by a multiplication.
    return x / torch.full((), 127.0, dtype=torch.float32, device=x.device)


def _cut_scale(scales: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Clears all but the upper bytes of scales."""
    return (scales.view(torch.int32) & -1 << 8 * (4 - num_bytes)).view(torch.float32)


def _scale_bytes(scales: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Returns the upper bytes (..., n * num_bytes) of scales (..., n)."""
    return scales[..., None].view(torch.uint8)[..., -num_bytes:].flatten(-2)


def _read_scales(scale_bytes: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Returns the scales (..., n) whose upper bytes these are (..., n * num_bytes)."""
    upper = scale_bytes.unflatten(-1, (-1, num_bytes))
    return torch.nn.functional.pad(upper, (4 - num_bytes, 0)).view(torch.float32)[..., 0]


def _divide(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns x / scales, rounded to integers. Groups whose scale is 0 or subnormal become zeros."""
    tiny = torch.finfo(torch.float32).tiny
    return (x / torch.where(scales.abs() < tiny, torch.ones_like(scales), scales)).round_().nan_to_num_()


KVTensor: TypeAlias = torch.Tensor | QuantizedKV
KVPair: TypeAlias = tuple[KVTensor, KVTensor]  # keys and values


def entry_bytes(dtype: torch.dtype, head_dim: int) -> int:
    """Returns the bytes of an entry's key and value in a KV cache of a dtype, with their scales."""
    if dtype == INT4:
        return Int4KV.bytes_of(head_dim, True) + Int4KV.bytes_of(head_dim, False)
    scale_bytes = torch.float32.itemsize if dtype == torch.int8 else 0
    return 2 * (head_dim * dtype.itemsize + scale_bytes)
