"""KV entries outside of a store, for host memory and files."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVEntries:
    """Keys, values and features of n tokens outside of a store.

    Attributes:
        keys: (layers, kv_heads, n, head_dim), after RoPE. Of a quantized KV the entries' bytes,
            (layers, kv_heads, n, bytes).
        values: as ``keys``.
        features: (n, feature layers x feature_size); None without features.
    """

    keys: torch.Tensor
    values: torch.Tensor
    features: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values, self.features) if x is not None)
