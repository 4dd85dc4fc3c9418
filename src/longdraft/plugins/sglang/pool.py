"""Keys and values of one layer in SGLang's KV pool."""

from __future__ import annotations

import torch

from longdraft.errors import CapabilityError


def rows(buffer: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(kv_heads, n, head_dim) rows of n tokens, of a pool's keys or values.

    Args:
        buffer: (rows, kv_heads, head_dim), or in pages (pages, kv_heads, page, head_dim).
        places: (n,) row of each token, counted through the pages.

    Raises:
        CapabilityError: a pool that lies otherwise, or is quantized.
    """
    if buffer.dim() not in (3, 4) or not buffer.dtype.is_floating_point or buffer.dtype.itemsize < 2:
        raise CapabilityError(
            f"A KV pool of {tuple(buffer.shape)} in {buffer.dtype} is not read here: use SGLang's NGRAM."
        )
    places = places.to(buffer.device, torch.long)
    if buffer.dim() == 3:
        return buffer[places].transpose(0, 1)
    page = buffer.shape[2]
    return buffer[places // page, :, places % page].transpose(0, 1)
