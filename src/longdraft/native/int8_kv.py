"""Keys or values in int8 with a scale for each entry of a head."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from longdraft.native.header import ENUMS

# torch dtypes of the KV cache that kernels read -> KVDtype.
KV_DTYPE_IDS = {getattr(torch, name.lower()): number for name, number in ENUMS["KVDtype"].items()}


class Int8KV:
    """Stands in for a tensor (..., entries, head_dim), with indexing and assignment (the last dimension by slices).

    An entry is scale * quants, scale = its largest magnitude / 127. A slice of an entry has the scale of the whole.

    Args:
        quants: (..., entries, head_dim) int8.
        scales: (..., entries) float32.
    """

    dtype = torch.int8

    def __init__(self, quants: torch.Tensor, scales: torch.Tensor) -> None:
        self.quants, self.scales = quants, scales
        self.shape, self.device, self.stride = quants.shape, quants.device, quants.stride

    @classmethod
    def quantize(cls, x: torch.Tensor) -> Int8KV:
        """Quantizes floats. An entry that is not finite gets a scale that is not finite."""
        x = x.float()
        # Divides by a tensor: on a GPU, torch multiplies by the inverse of a number.
        scales = x.abs().amax(-1) / torch.full((), 127.0, dtype=torch.float32, device=x.device)
        tiny = torch.finfo(torch.float32).tiny  # for entries of zeros
        return cls((x / scales.clamp_min(tiny)[..., None]).round_().to(torch.int8), scales)

    def __getitem__(self, index: Any) -> Int8KV:
        return Int8KV(self.quants[index], self.scales[self._scale_index(index)])

    def __setitem__(self, index: Any, entries: torch.Tensor | Int8KV) -> None:
        new = entries if isinstance(entries, Int8KV) else Int8KV.quantize(entries)
        self.quants[index], self.scales[self._scale_index(index)] = new.quants, new.scales

    def _scale_index(self, index: Any) -> Any:
        """The index without its part for the last dimension."""
        return index[:-1] if isinstance(index, tuple) and len(index) == self.quants.ndim else index

    def index_select(self, dim: int, index: torch.Tensor) -> Int8KV:
        """dim: not negative, and not the last one."""
        return Int8KV(self.quants.index_select(dim, index), self.scales.index_select(dim, index))

    def transpose(self, first: int, second: int) -> Int8KV:
        """Both dimensions: not negative, and not the last one."""
        return Int8KV(self.quants.transpose(first, second), self.scales.transpose(first, second))

    def data_ptr(self) -> int:
        return self.quants.data_ptr()

    def zero_(self) -> Int8KV:
        self.quants.zero_()
        self.scales.zero_()
        return self

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantizes."""
        return (self.quants * self.scales[..., None]).to(dtype)


KVTensor: TypeAlias = torch.Tensor | Int8KV
