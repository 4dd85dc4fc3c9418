"""Times one layer's attention on a GPU: for the stages `environment` and `kernels` of benchmarks/gpu.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

Run = Callable[[], torch.Tensor]


def tree_mask(batch: int, size: int) -> torch.Tensor | None:
    """(B, T, T) ancestor masks of binary trees in breadth-first order; None for a single row."""
    if size == 1:
        return None
    mask = torch.zeros(size, size, dtype=torch.bool)
    for i in range(size):
        if i:
            mask[i] = mask[(i - 1) // 2]
        mask[i, i] = True
    return mask.expand(batch, -1, -1)


def milliseconds(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median time of each path over ``rounds`` rounds in which every path runs once."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    for run in runs.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            # Keeps the GPU busy while the host launches: in a forward, launches run ahead of the GPU too.
            torch.cuda._sleep(1_000_000)
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def captured(run: Run) -> Run:
    """The same work replayed as a CUDA graph, which is how the runner calls it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large device copy."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    time = milliseconds({"copy": lambda: target.copy_(source)}, 10)["copy"]
    return 2 * source.numel() / (time / 1e3)
