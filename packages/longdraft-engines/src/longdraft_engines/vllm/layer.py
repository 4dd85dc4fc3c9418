"""One attention layer of vLLM's target: its keys and values in vLLM's pages, and the queries that vLLM computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from longdraft.errors import CapabilityError

# The instruction set whose packing of the CPU backend's pages is read here.
_VEC = "vec"


class AttentionLayer:
    """A layer as vLLM keeps it.

    A page of its cache is (kv_heads, block, 2 head_dim) numbers. On a GPU (FlashAttention, Triton, FlexAttention) each
    token's value follows its key. The CPU backend packs pages by instruction set. Of these, "vec" in float32 is read
    here: for each head the keys as (head_dim, block), then the values as (block, head_dim).

    Args:
        config: vLLM's ``VllmConfig``. index: of the decoder layer.

    Attributes:
        name: vLLM's name. attention: its module.

    Raises:
        CapabilityError: the model has no such layer.
    """

    def __init__(self, config: Any, index: int) -> None:
        self.config = config
        context = config.compilation_config.static_forward_context
        names = [name for name in context if f".layers.{index}." in f".{name}."]
        if len(names) != 1:
            raise CapabilityError(
                f"Layer {index} of {config.model_config.model} has {len(names)} caches in vLLM where a draft reads "
                "one: use longdraft_engines.vllm.Lookup."
            )
        self.name = names[0]
        self.attention = context[self.name]
        self._checked = False

    def read(self, runner: Any, req_index: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (kv_heads, stop - start, head_dim) of a row of the engine's batch.

        Args:
            runner: vLLM's model runner. start, stop: positions.

        Raises:
            CapabilityError: the cache has another layout.
        """
        cache: torch.Tensor = self.attention.kv_cache
        if not self._checked:
            self._check(cache)
        groups = runner.kv_cache_config.kv_cache_groups
        group = next(i for i, group in enumerate(groups) if self.name in group.layer_names)
        table = runner.input_batch.block_table[group].block_table.np[req_index]
        size = cache.shape[2]
        positions = np.arange(start, stop)
        blocks = torch.from_numpy(table[positions // size].astype(np.int64)).to(cache.device)
        places = torch.from_numpy(positions % size).to(cache.device)
        keys, values = (read_vec_pages if cache.device.type == "cpu" else read_interleaved_pages)(cache, blocks, places)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _check(self, cache: torch.Tensor) -> None:
        packing = getattr(self.attention, "isa", _VEC)
        if cache.device.type == "cpu" and (packing != _VEC or cache.dtype != torch.float32):
            raise CapabilityError(
                f"vLLM packs this CPU's KV cache for {packing} in {cache.dtype}, which is not read here: serve in "
                "float32 (--dtype float32), or use longdraft_engines.vllm.Lookup."
            )
        if cache.dim() != 4 or not cache.dtype.is_floating_point or cache.dtype.itemsize < 2:
            raise CapabilityError(
                f"A KV cache of {tuple(cache.shape)} in {cache.dtype} is not read here: use "
                "longdraft_engines.vllm.Lookup."
            )
        self._checked = True


def read_interleaved_pages(
    cache: torch.Tensor, block_ids: torch.Tensor, block_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (n, kv_heads, head_dim) of n tokens, in pages (pages, kv_heads, block, 2 head_dim).

    Args:
        blocks, places: (n,) the page of each token, and its place there.
    """
    keys, values = cache[block_ids, :, block_offsets].chunk(2, dim=-1)
    return keys, values


def read_vec_pages(
    cache: torch.Tensor, block_ids: torch.Tensor, block_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as :func:`read_interleaved_pages`, for pages that the CPU backend packs for "vec"."""
    pages, heads, block, both = cache.shape
    keys, values = cache.view(pages, heads, 2, -1).unbind(2)
    keys = keys.view(pages, heads, both // 2, block)
    return keys[block_ids, :, :, block_offsets], values.view(pages, heads, block, both // 2)[
        block_ids, :, block_offsets
    ]


class StepQueries:
    """A layer's queries, after RoPE, of the tokens that vLLM computed in its newest step.

    vLLM's compiled models and CUDA graphs call a layer's attention as one opaque operation; its implementation is
    wrapped here. The wrapper adds one copy to memory that never moves, so a recorded graph repeats the copy although
    no Python runs then.
    """

    def __init__(self, layer: AttentionLayer, device: torch.device) -> None:
        config, attention = layer.config, layer.attention
        longest = config.scheduler_config.max_num_batched_tokens
        shape = longest, attention.num_heads, attention.head_size
        kept = torch.zeros(shape, dtype=config.model_config.dtype, device=device)
        compute = attention.impl.forward

        def forward(module: Any, query: torch.Tensor, *others: Any, **settings: Any) -> Any:
            kept[: len(query)].copy_(query[:longest])
            return compute(module, query, *others, **settings)

        attention.impl.forward = forward
        self._kept = kept

    def read(self, runner: Any, req_index: int, stop: int, num_positions: int) -> torch.Tensor | None:
        """Queries (Hq, n, d) of the ``num_positions`` positions before ``stop`` in a row of the engine's batch.

        They are fewer if this step computed fewer of these positions, and None if it computed none before ``stop``.

        Args:
            runner: vLLM's model runner, after the step.
        """
        first = int(runner.input_batch.num_computed_tokens_cpu[req_index])  # position of the step's first token
        begin, end = runner.query_start_loc.np[req_index : req_index + 2].tolist()
        if not first < stop <= first + end - begin:
            return None
        place = begin + stop - first
        return self._kept[max(begin, place - num_positions) : place].transpose(0, 1).clone()
