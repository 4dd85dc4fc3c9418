"""An int8 KV cache: keys or values in int8, with a float32 scale for each entry of a head."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from longdraft.native.header import ENUMS

# torch dtype of a KV cache that kernels can read -> its number in the enumeration KVDtype.
KV_DTYPE_IDS = {getattr(torch, name.lower()): number for name, number in ENUMS["KVDtype"].items()}


class Int8KV:
    """Stands in for a tensor (..., entries, head_dim) of keys or values, and stores it in int8.

    An entry is scale * quants, where scale = the entry's largest magnitude / 127. Supports indexing like a tensor; the
    last dimension by slices only, because a part of an entry keeps the entry's scale.

    Args:
        quants: the quantized numbers (..., entries, head_dim), int8.
        scales: the scale of each entry (..., entries), float32.
    """

    dtype = torch.int8

    def __init__(self, quants: torch.Tensor, scales: torch.Tensor) -> None:
        self.quants, self.scales = quants, scales
        self.shape, self.device, self.stride = quants.shape, quants.device, quants.stride

    @classmethod
    def quantize(cls, x: torch.Tensor) -> Int8KV:
        """Quantizes floats (..., entries, head_dim). A NaN or infinite number makes its scale not finite."""
        x = x.float()
        # The divisor is a tensor, because on a GPU torch replaces division by a Python number by a multiplication.
        scales = x.abs().amax(-1) / torch.full((), 127.0, dtype=torch.float32, device=x.device)
        tiny = torch.finfo(torch.float32).tiny  # avoids 0 / 0 in entries of zeros
        return cls((x / scales.clamp_min(tiny)[..., None]).round_().to(torch.int8), scales)

    def __getitem__(self, index: Any) -> Int8KV:
        return Int8KV(self.quants[index], self.scales[self._scale_index(index)])

    def __setitem__(self, index: Any, entries: torch.Tensor | Int8KV) -> None:
        quantized = entries if isinstance(entries, Int8KV) else Int8KV.quantize(entries)
        self.quants[index], self.scales[self._scale_index(index)] = quantized.quants, quantized.scales

    def _scale_index(self, index: Any) -> Any:
        """Returns an index of quants as an index of scales, which have no last dimension."""
        return index[:-1] if isinstance(index, tuple) and len(index) == self.quants.ndim else index

    def index_select(self, dim: int, index: torch.Tensor) -> Int8KV:
        """Does Tensor.index_select(); ``dim`` must be neither negative nor the last dimension."""
        return Int8KV(self.quants.index_select(dim, index), self.scales.index_select(dim, index))

    def transpose(self, first: int, second: int) -> Int8KV:
        """Does Tensor.transpose(); neither dimension may be negative or the last."""
        return Int8KV(self.quants.transpose(first, second), self.scales.transpose(first, second))

    def data_ptr(self) -> int:
        return self.quants.data_ptr()

    def zero_(self) -> Int8KV:
        self.quants.zero_()
        self.scales.zero_()
        return self

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns a dequantized tensor."""
        return (self.quants * self.scales[..., None]).to(dtype)


KVTensor: TypeAlias = torch.Tensor | Int8KV
KVPair: TypeAlias = tuple[KVTensor, KVTensor]  # keys and values
