"""The queries of one layer, as vLLM computes them."""

from __future__ import annotations

from typing import Any

import torch

from longdraft.plugins.vllm.layer import Layer


class StepQueries:
    """After RoPE, of the tokens that vLLM computed in its newest step.

    vLLM's compiled models and CUDA graphs call a layer's attention as one opaque operation, whose implementation is
    wrapped here. What it adds is one copy to memory that never moves: a recorded graph repeats the copy, too, although
    no Python runs then.
    """

    def __init__(self, layer: Layer, device: torch.device) -> None:
        config, attention = layer.config, layer.attention
        most = config.scheduler_config.max_num_batched_tokens
        kept = torch.zeros(
            most, attention.num_heads, attention.head_size, dtype=config.model_config.dtype, device=device
        )
        computed = attention.impl.forward

        def forward(module: Any, query: torch.Tensor, *others: Any, **settings: Any) -> Any:
            kept[: len(query)].copy_(query[:most])
            return computed(module, query, *others, **settings)

        attention.impl.forward = forward
        self._kept = kept

    def read(self, runner: Any, row: int, stop: int, count: int) -> torch.Tensor | None:
        """Queries (Hq, n, d) of a row of the engine's batch: of the ``count`` positions before ``stop``, or as many of
        them as this step computed. None: it computed another part of the text.

        Args:
            runner: vLLM's model runner, after the step.
        """
        first = int(runner.input_batch.num_computed_tokens_cpu[row])  # position of the step's first token
        begin, end = runner.query_start_loc.np[row : row + 2].tolist()
        if not first < stop <= first + end - begin:
            return None
        place = begin + stop - first
        return self._kept[max(begin, place - count) : place].transpose(0, 1).clone()
