"""Keys and values of one layer in vLLM's pages, and how they lie there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from longdraft.errors import CapabilityError
from longdraft.plugins.vllm.layer import Layer

# Instruction sets by which vLLM's CPU backend packs a page in the way that is read here.
_VEC = "vec"


class Pages:
    """A layer's keys and values in the engine's cache.

    A page is (kv_heads, block, 2 head_dim) numbers. On a GPU (FlashAttention, Triton, FlexAttention) a token's key and
    value stand one behind the other. The CPU backend packs pages by instruction set; of these "vec" in float32 is read
    here: a head's keys as (head_dim, block), its values behind them as (block, head_dim).

    Raises:
        CapabilityError: a cache that lies otherwise.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._checked = False

    def read(self, runner: Any, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (kv_heads, stop - start, head_dim) of a row of the engine's batch.

        Args:
            runner: vLLM's model runner. start, stop: positions.
        """
        cache: torch.Tensor = self._layer.attention.kv_cache
        if not self._checked:
            self._check(cache)
        table = runner.input_batch.block_table[self._group(runner)].block_table.np[row]
        size = cache.shape[2]
        positions = np.arange(start, stop)
        blocks = torch.from_numpy(table[positions // size].astype(np.int64)).to(cache.device)
        places = torch.from_numpy(positions % size).to(cache.device)
        keys, values = (packed if cache.device.type == "cpu" else side_by_side)(cache, blocks, places)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _group(self, runner: Any) -> int:
        groups = runner.kv_cache_config.kv_cache_groups
        return next(i for i, group in enumerate(groups) if self._layer.name in group.layer_names)

    def _check(self, cache: torch.Tensor) -> None:
        packing = getattr(self._layer.attention, "isa", _VEC)
        if cache.device.type == "cpu" and (packing != _VEC or cache.dtype != torch.float32):
            raise CapabilityError(
                f"vLLM packs this CPU's KV cache for {packing} in {cache.dtype}, which is not read here: serve in "
                "float32 (--dtype float32), or use longdraft.plugins.vllm.Lookup."
            )
        if cache.dim() != 4 or not cache.dtype.is_floating_point or cache.dtype.itemsize < 2:
            raise CapabilityError(
                f"A KV cache of {tuple(cache.shape)} in {cache.dtype} is not read here: use "
                "longdraft.plugins.vllm.Lookup."
            )
        self._checked = True


def side_by_side(cache: torch.Tensor, blocks: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (n, kv_heads, head_dim) of n tokens, of pages (pages, kv_heads, block, 2 head_dim).

    Args:
        blocks, places: (n,) page of each token, and its place there.
    """
    keys, values = cache[blocks, :, places].chunk(2, dim=-1)
    return keys, values


def packed(cache: torch.Tensor, blocks: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of pages as the CPU backend packs them for "vec"."""
    pages, heads, block, both = cache.shape
    keys, values = cache.view(pages, heads, 2, -1).unbind(2)
    keys = keys.view(pages, heads, both // 2, block)
    return keys[blocks, :, :, places], values.view(pages, heads, block, both // 2)[blocks, :, places]
