"""The stage of benchmarks/gpu.py that comes first: in two minutes, what decides how fast everything else will be.

Whether forwards are recorded as CUDA graphs, and what that brings, in a store as large as the text and in one that is
much larger; which attention path is the fastest at 16K and 60K tokens for 1, 16 and 64 rows; and how much of a
forward is spent in small kernels.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import Any

import torch
from gpu_cases import attention_case, call_ms, filled, median_ms, star
from gpu_common import (
    Sizes,
    can_be_recorded,
    device_of,
    environment,
    give_back,
    half_of,
    paths,
    random_llama,
    setups,
    short,
    sizes_of,
)
from gpu_results import Rows, Skipped, Stage

from longdraft.attention import dispatch
from longdraft.engine.schedule import verify_trees
from longdraft.errors import MemoryBudgetError
from longdraft.memory.store import KVStore
from longdraft.model import graphs
from longdraft.model.runner import TargetRunner

# Parts of the names of kernels, and of torch's operators where there is no GPU.
PRODUCTS = ("gemm", "gemv", "cutlass", "cublas", "nvjet", "xmma", "matmul", "linear", "::mm", "::bmm", "::addmm")
ATTENTION = ("flash", "fmha", "attention", "attend", "prefix_kernel", "block_kernel", "merge_kernel")


def probe(stage: Stage, options: argparse.Namespace) -> None:
    device, sizes = device_of(), sizes_of(options)
    dtype = half_of(device)
    runs = [name for name in paths(device, dtype, sizes.head_dim) if device.type == "cuda" or name != "triton"]
    large = sizes.large_capacity
    with torch.inference_mode():
        for context, rows in itertools.product(sizes.probe_contexts, sizes.probe_rows):
            for capacity in (None, large):
                room = "exact capacity" if capacity is None else f"capacity {large:,}"
                work = functools.partial(race, runs, sizes, context, rows, capacity, device, dtype)
                stage.measure(f"paths, {context:,} tokens, {rows} rows, {room}", work)
                give_back(device)
        model = random_llama(
            sizes.model | {"num_hidden_layers": sizes.probe_layers}, sizes, device, dtype, 2 * large
        )  # fmt: skip
        default = next(iter(setups(device, dtype, sizes.head_dim)))
        for name in [default, *(n for n in runs if n != default and can_be_recorded(n, device))]:
            for capacity in (None, large):
                room = "exact capacity" if capacity is None else f"capacity {large:,}"
                work = functools.partial(recorded, model, name, sizes, capacity)
                stage.measure(f"graphs, {name}, {room}", work)
                give_back(device)
        for rows in sizes.probe_rows:
            stage.measure(f"kernels of a forward, {rows} rows", functools.partial(profiled, model, sizes, rows))
            give_back(device)


# --- attention paths ---


def race(
    names: list[str],
    sizes: Sizes,
    context: int,
    rows: int,
    capacity: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Rows:
    """Milliseconds of one layer's attention by path, as a graph where that can be recorded, and the fastest path."""
    attends = paths(device, dtype, sizes.head_dim)
    case = attention_case(sizes, (context,), rows, device, dtype, capacity=capacity and capacity + rows)
    found: dict[str, Any] = {}
    broken = []
    for name in names:
        try:
            graph = can_be_recorded(name, device)
            found[name] = call_ms(lambda name=name: attends[name](*case), graph, sizes.repeats, device)  # type: ignore[misc]
        except Exception as error:  # the others are compared all the same
            broken.append(f"{name}: {type(error).__name__}: {error}"[:200])
    if not found:
        raise RuntimeError("; ".join(broken))
    row = {"what": "race", "context": context, "rows": rows, "capacity": case[1].shape[2], "dtype": short(dtype)}
    return [row | found | {"fastest": min(found, key=found.__getitem__), "broken": "; ".join(broken) or None}]


# --- graphs ---


def recorded(model: torch.nn.Module, path: str, sizes: Sizes, capacity: int | None) -> Rows:
    """Milliseconds of a forward, launched kernel by kernel and recorded, by context and rows."""
    found: Rows = []
    for context, rows in itertools.product(sizes.probe_contexts, sizes.probe_rows):
        row: dict[str, Any] = {"what": "recorded", "path": path, "context": context, "rows": rows}
        for kind, switch in (("eager_ms", "0"), ("recorded_ms", None)):
            with environment(**{dispatch.ENVIRONMENT: path, graphs.SWITCH: switch}):
                runner = TargetRunner(model)  # type: ignore[arg-type]
                recording = runner.graphs.recording
                if kind == "recorded_ms" and not recording:
                    row |= {kind: None, "recorded": False}
                    continue
                store = _store(runner, context, max(sizes.probe_rows), capacity)
                row |= {kind: _forward_ms(runner, store, context, rows, sizes.repeats), "capacity": store.capacity}
                if switch is None:
                    row["recorded"] = runner.graphs.recording  # off where a recording failed
        # A path that says it can be recorded and was not is wrong.
        row["right"] = row["recorded"] or not can_be_recorded(path, runner.device)
        found.append(row)
    return found


def _store(runner: TargetRunner, context: int, rows: int, capacity: int | None) -> KVStore:
    try:
        return filled(runner, context, rows, capacity)
    except (MemoryBudgetError, torch.OutOfMemoryError) as error:
        raise Skipped(str(error)) from error


def _forward_ms(runner: TargetRunner, store: KVStore, context: int, rows: int, repeats: int) -> float:
    return median_ms(
        lambda: verify_trees(runner, store, [0], [star(rows)], [context]), 2 * repeats, graphs.USES + 2, runner.device
    )


# --- kernels of a forward ---


def profiled(model: torch.nn.Module, sizes: Sizes, rows: int) -> Rows:
    """Kernels of an unrecorded forward by kind, as torch's profiler sees them: launches a layer, shares of the time."""
    context = min(sizes.probe_contexts)
    with environment(**{dispatch.ENVIRONMENT: None, graphs.SWITCH: "0"}):
        runner = TargetRunner(model)  # type: ignore[arg-type]
        store = _store(runner, context, rows, None)
        wall = _forward_ms(runner, store, context, rows, sizes.repeats)
        calls = kernels_of(runner.device, lambda: verify_trees(runner, store, [0], [star(rows)], [context]))
    busy = sum(us for _, us in calls)
    layers = int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    shares = {kind: sum(us for name, us in calls if kind_of(name) == kind) / busy for kind in KINDS} if busy else {}
    row = {"what": "profile", "rows": rows, "context": context, "launches": len(calls) / layers}
    return [row | shares | {"busy_ms": busy / 1e3, "wall_ms": wall, "busy": busy / 1e3 / wall}]


KINDS = ("products", "attention", "small")


def kind_of(kernel: str) -> str:
    """Matrix products, attention, or a small kernel: norms, rotation, copies, sums."""
    name = kernel.lower()
    if any(part in name for part in ATTENTION):
        return "attention"
    return "products" if any(part in name for part in PRODUCTS) else "small"


def kernels_of(device: torch.device, run: Any) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel of a call; without a GPU, of every operator of torch."""
    gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    run()
    with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if gpu else [])]) as seen:
        run()
        if gpu:
            torch.cuda.synchronize(device)
    events = [e for e in seen.events() if (e.device_type == torch.autograd.DeviceType.CUDA) == gpu]
    return [(e.name, float(e.time_range.elapsed_us() if gpu else e.self_cpu_time_total)) for e in events]
