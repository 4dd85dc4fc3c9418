"""Reads keys, values and queries of one attention layer of vLLM's target.

vLLM calls a page of its KV cache a block. ``block_size`` is the number of tokens in a page.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from longdraft.errors import CapabilityError

# vLLM's CPU backend packs pages for an instruction set. Only this packing can be read here.
_VEC_PACKING = "vec"


class AttentionLayer:
    """Reads the KV cache of a decoder layer in vLLM. Raises CapabilityError if the model has no such layer.

    The cache has the shape (pages, kv_heads, block_size, 2 * head_dim). On a GPU (FlashAttention, Triton,
    FlexAttention) a token's value follows the token's key. On a CPU with packing "vec", in float32, a page has for each
    head all keys as (head_dim, block_size), then all values as (block_size, head_dim).

    Args:
        config: vLLM's ``VllmConfig``.
        index: index of the decoder layer.

    Attributes:
        name: vLLM's name of the attention module.
        attention: the attention module.
    """

    def __init__(self, config: Any, index: int) -> None:
        self.config = config
        context = config.compilation_config.static_forward_context
        names = [name for name in context if f".layers.{index}." in f".{name}."]
        if len(names) != 1:
            raise CapabilityError(
                f"Layer {index} of {config.model_config.model} has {len(names)} caches in vLLM, and a draft "
                "reads exactly one: use longdraft_engines.vllm.Lookup."
            )
        self.name = names[0]
        self.attention = context[self.name]
        self._layout_checked = False

    def read(self, runner: Any, req_index: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values (kv_heads, stop - start, head_dim) of a request.
        Raises CapabilityError if the layout of the cache is not supported.

        Args:
            runner: vLLM's model runner.
            req_index: the request's index in vLLM's input batch.
            start: the first position.
            stop: the position after the last one.
        """
        cache: torch.Tensor = self.attention.kv_cache
        if not self._layout_checked:
            self._check(cache)
        groups = runner.kv_cache_config.kv_cache_groups
        group_index = next(i for i, group in enumerate(groups) if self.name in group.layer_names)
        block_table = runner.input_batch.block_table[group_index].block_table.np[req_index]
        block_size = cache.shape[2]
        positions = np.arange(start, stop)
        block_ids = torch.from_numpy(block_table[positions // block_size].astype(np.int64)).to(cache.device)
        block_offsets = torch.from_numpy(positions % block_size).to(cache.device)
        read_pages = read_vec_pages if cache.device.type == "cpu" else read_interleaved_pages
        keys, values = read_pages(cache, block_ids, block_offsets)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _check(self, cache: torch.Tensor) -> None:
        packing = getattr(self.attention, "isa", _VEC_PACKING)
        if cache.device.type == "cpu" and (packing != _VEC_PACKING or cache.dtype != torch.float32):
            raise CapabilityError(
                f"vLLM packs this CPU's KV cache for {packing} in {cache.dtype}, which longdraft cannot read: serve in "
                "float32 (--dtype float32), or use longdraft_engines.vllm.Lookup."
            )
        # A page of another attention backend has another number of dimensions; fp8 takes one byte.
        if cache.dim() != 4 or not cache.dtype.is_floating_point or cache.dtype.itemsize < 2:
            raise CapabilityError(
                f"longdraft cannot read a KV cache of {tuple(cache.shape)} in {cache.dtype}: use "
                "longdraft_engines.vllm.Lookup."
            )
        self._layout_checked = True


def read_interleaved_pages(cache: Tensor, block_ids: Tensor, block_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values (n, kv_heads, head_dim) of n tokens from a GPU's cache; see :class:`AttentionLayer`.

    Args:
        block_ids: (n,) the page of each token.
        block_offsets: (n,) the token's offset in the page.
    """
    keys, values = cache[block_ids, :, block_offsets].chunk(2, dim=-1)
    return keys, values


def read_vec_pages(cache: Tensor, block_ids: Tensor, block_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what :func:`read_interleaved_pages` returns, from a CPU's cache with packing "vec"."""
    pages, heads, block_size, head_dim = *cache.shape[:3], cache.shape[3] // 2
    keys, values = cache.view(pages, heads, 2, -1).unbind(2)
    keys = keys.view(pages, heads, head_dim, block_size)
    values = values.view(pages, heads, block_size, head_dim)
    return keys[block_ids, :, :, block_offsets], values[block_ids, :, block_offsets]


class StepQueries:
    """Keeps a layer's queries, after RoPE, of the tokens that vLLM computed in its last step.

    Replaces the forward of the layer's attention, which vLLM's compiled models and CUDA graphs call as one opaque
    operation. The new forward copies the queries to a fixed buffer, so that replays of a graph copy them too.
    """

    def __init__(self, layer: AttentionLayer, device: torch.device) -> None:
        config, attention = layer.config, layer.attention
        max_tokens = config.scheduler_config.max_num_batched_tokens
        shape = max_tokens, attention.num_heads, attention.head_size
        buffer = torch.zeros(shape, dtype=config.model_config.dtype, device=device)
        original = attention.impl.forward

        def forward(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            buffer[: len(query)].copy_(query[:max_tokens])
            return original(module, query, *args, **kwargs)

        attention.impl.forward = forward
        self._buffer = buffer

    def read(self, runner: Any, req_index: int, stop: int, num_positions: int) -> torch.Tensor | None:
        """Returns queries (heads, n, head_dim) of a request at the last n positions before ``stop``.

        n is ``num_positions``, or the number of these positions that the step computed if that is smaller. Returns None
        if the step did not compute position ``stop - 1``.

        Args:
            runner: vLLM's model runner, after the step.
            req_index: the request's index in vLLM's input batch.
        """
        first = int(runner.input_batch.num_computed_tokens_cpu[req_index])  # position of the step's first token
        # start_loc, end_loc: where the request's queries are in the buffer.
        start_loc, end_loc = runner.query_start_loc.np[req_index : req_index + 2].tolist()
        if not first < stop <= first + end_loc - start_loc:
            return None
        stop_loc = start_loc + stop - first
        return self._buffer[max(start_loc, stop_loc - num_positions) : stop_loc].transpose(0, 1).clone()
