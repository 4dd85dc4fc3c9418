"""Times the Triton attention against SDPA and the reference on a GPU, after checking that it is right there.

    python benchmarks/attention_triton.py [--dtype bfloat16] [--heads 32 8] [--head-dim 128] [--batch 1]

A time is GPU time in milliseconds: the median of alternating runs (each round runs every path once, in turn,
between CUDA events), with the L2 cache flushed before each. "of peak" is the K/V bytes that must be read, once
per KV head, over the time, as a share of the copy bandwidth measured here: no decoding attention exceeds 100 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch

from longdraft.attention import reference
from longdraft.attention.block import Block

Run = Callable[[], torch.Tensor]

CONTEXTS = [1024, 4096, 16384, 65536]
SIZES = [1, 8, 64]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The reference repeats K in float32 for every query head: beyond this many scores it is left out.
REFERENCE_LIMIT = 2**28


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("QUERY", "KV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to time")
        return 0

    from longdraft.attention import sdpa, triton_backend

    dtype: torch.dtype = getattr(torch, args.dtype)
    (heads, kv_heads), dim, batch = args.heads, args.head_dim, args.batch
    scale = dim**-0.5
    peak = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {peak / 1e12:.2f} TB/s copy")
    print(f"batch {batch}, {heads} query and {kv_heads} KV heads of {dim}, {args.dtype}; medians of {args.rounds}")
    print(
        f"{'context':>8} {'T':>4} {'reference':>10} {'SDPA':>9} {'Triton':>9} {'graph':>9}"
        f" {'ref/Tri':>8} {'SDPA/Tri':>9} {'of peak':>8} {'error':>9}"
    )
    wrong = False
    for context in CONTEXTS:
        for size in SIZES:
            capacity = context + size
            q = torch.randn(batch, heads, size, dim, device="cuda", dtype=dtype)
            keys = torch.randn(batch, kv_heads, capacity, dim, device="cuda", dtype=dtype)
            values = torch.randn_like(keys)
            block = Block.make(range(batch), [context] * batch, size, tree_mask(batch, size), "cuda")
            inputs = (q, keys, values, block, scale)

            expected = reference.attend(*inputs)
            error = (triton_backend.attend(*inputs).float() - expected.float()).abs().max().item()
            if not error <= TOLERANCE[dtype]:  # NaN is wrong too
                print(f"{context:>8} {size:>4} WRONG: differs from the reference by {error:.1e}; not timed")
                wrong = True
                continue

            runs: dict[str, Run] = {
                "sdpa": lambda i=inputs: sdpa.attend(*i),  # type: ignore[misc]
                "triton": lambda i=inputs: triton_backend.attend(*i),  # type: ignore[misc]
            }
            runs["graph"] = captured(runs["triton"])
            if batch * heads * size * context <= REFERENCE_LIMIT:
                runs["reference"] = lambda i=inputs: reference.attend(*i)  # type: ignore[misc]
            ms = milliseconds(runs, args.rounds)
            share = (keys.numel() + values.numel()) * keys.element_size() / (ms["graph"] / 1e3) / peak
            slow = ms.get("reference")
            slow_ms, ratio = (f"{slow:.3f}", f"{slow / ms['triton']:.1f}x") if slow else ("-", "-")
            print(
                f"{context:>8} {size:>4} {slow_ms:>10} {ms['sdpa']:>9.3f} {ms['triton']:>9.3f}"
                f" {ms['graph']:>9.3f} {ratio:>8} {ms['sdpa'] / ms['triton']:>8.2f}x {share:>7.0%} {error:>9.1e}"
            )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
