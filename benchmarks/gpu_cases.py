"""What several stages of benchmarks/gpu.py time and check: attention's arguments, trees, filled stores, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import kernel_timing
import torch
from gpu_common import Sizes

from longdraft.attention.block import Block
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import TokenTree

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Block, float]


def attention_case(
    sizes: Sizes,
    lengths: tuple[int, ...],
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    chain: bool = False,
    capacity: int | None = None,
) -> Case:
    """Arguments of an attention path: random q, keys and values, a tree of so many rows behind each prefix.

    Args:
        chain: rows form a causal chain instead of a tree.
        capacity: rows of a slot; None: as many as are used.
    """
    batch, capacity = len(lengths), capacity or max(lengths) + rows
    g = torch.Generator(device).manual_seed(rows)

    def randn(heads: int, n: int) -> torch.Tensor:
        return torch.randn(batch, heads, n, sizes.head_dim, generator=g, device=device, dtype=dtype)

    mask = None if chain else kernel_timing.tree_mask(batch, rows)
    block = Block.make(range(batch), lengths, rows, mask, device)
    q, keys, values = randn(sizes.heads, rows), randn(sizes.kv_heads, capacity), randn(sizes.kv_heads, capacity)
    return q, keys, values, block, sizes.head_dim**-0.5


def star(nodes: int) -> TokenTree:
    """A root with nodes - 1 children."""
    return TokenTree(tuple(range(nodes)), (-1, *[0] * (nodes - 1)))


def filled(runner: TargetRunner, context: int, nodes: int, capacity: int | None = None) -> KVStore:
    """A store of random rows: what a forward costs does not depend on what the keys say.

    Args:
        capacity: rows of its slot; None: as many as are used.
    """
    store = runner.new_store(1, capacity or context + nodes)
    g = torch.Generator(runner.device).manual_seed(0)
    for tensor in (store.keys, store.values):
        for layer in tensor:
            layer.normal_(generator=g)
    store.lengths[0] = context
    return store


def median_ms(call: Callable[[], Any], repeats: int, warm_up: int, device: torch.device) -> float:
    """Median milliseconds of a call on the host's clock, including the wait for its result."""
    times = []
    for i in range(warm_up + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= warm_up:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def call_ms(run: Callable[[], torch.Tensor], graph: bool, repeats: int, device: torch.device) -> float:
    """Median milliseconds of a call, or of its CUDA graph; GPU time if there is a GPU."""
    if device.type != "cuda":
        return median_ms(run, repeats, 1, device)
    run()  # compiles and tunes, which no graph may record
    return kernel_timing.milliseconds({"": kernel_timing.captured(run) if graph else run}, 3 * repeats)[""]
