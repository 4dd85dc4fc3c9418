"""Stages of benchmarks/gpu.py that time one layer's attention and the steps of a large model."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_on_paper
import kernel_timing
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
from gpu_machine import peak
from gpu_results import Rows, Skipped, Stage

from longdraft.engine.partial import partial_view
from longdraft.engine.schedule import verify_trees
from longdraft.errors import MemoryBudgetError
from longdraft.model import graphs
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from longdraft.views.cache import TrueCache

# --- one layer's attention ---


@torch.inference_mode()
def kernels(stage: Stage, options: argparse.Namespace) -> None:
    """Milliseconds of one layer's attention, by context, rows and path; as a graph too where that can be recorded."""
    device, sizes = device_of(), sizes_of(options)
    dtype = half_of(device)
    attends = paths(device, dtype, sizes.head_dim)
    if device.type != "cuda":
        attends.pop("triton", None)  # an interpreter: there is nothing to time
    bandwidth = functools.cache(kernel_timing.copy_bandwidth)
    bounds = functools.cache(functools.partial(triton_bounds, sizes, device))

    def measured(context: int, rows: int, name: str, graph: bool) -> Rows:
        case = attention_case(sizes, (context,), rows, device, dtype)
        ms = call_ms(lambda: attends[name](*case), graph, sizes.repeats, device)
        read = 2 * case[1].numel() * case[1].element_size()
        path = f"{name} graph" if graph else name
        row = {"what": "kernels", "context": context, "rows": rows, "path": path, "dtype": short(dtype), "ms": ms}
        row["of_bandwidth"] = read / (ms / 1e3) / bandwidth() if device.type == "cuda" else None
        return [row | {"bound_ms": bounds().get((context, rows)) if name == "triton" else None}]

    for context, rows, name in itertools.product(sizes.contexts, sizes.rows, attends):
        for graph in (False, True) if can_be_recorded(name, device) else (False,):
            unit = f"{context:,} tokens, {rows} rows, {name}{' graph' if graph else ''}"
            stage.measure(unit, functools.partial(measured, context, rows, name, graph))
            give_back(device)


def triton_bounds(sizes: Sizes, device: torch.device) -> dict[tuple[int, int], float]:
    """Lower bounds of the Triton kernels in milliseconds, by context and rows, from benchmarks/triton_roofline.py.

    That script replaces the kernels by stand-ins, so it runs in its own process. Empty for an unknown GPU.
    """
    if (card := peak(device)) is None:
        return {}
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    words = ["--card", card.bandwidth / 1e12, card.operations / 1e12, processors, "--batch", 1, "--json"]
    words += ["--heads", sizes.heads, sizes.kv_heads, "--head-dim", sizes.head_dim, "--nodes", *sizes.rows]
    script, found = Path(__file__).with_name("triton_roofline.py"), {}
    for context in sizes.contexts:
        command = [sys.executable, str(script), *map(str, words), "--prefix", str(context)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return {}
        for row in json.loads(done.stdout.splitlines()[-1]):
            found[context, row["nodes"]] = 1e3 * row["seconds"]
    return found


# --- steps of a large model ---


@torch.inference_mode()
def steps(stage: Stage, options: argparse.Namespace) -> None:
    """Milliseconds of a forward, by setup, context and nodes; on a partial cache with ``sizes.budget`` rows too."""
    device, sizes = device_of(), sizes_of(options)
    dtype, nodes = half_of(device), max(sizes.nodes)
    model = random_llama(sizes.model, sizes, device, dtype, max(sizes.contexts) + 2 * nodes)

    def measured(runner: TargetRunner, name: str, context: int) -> Rows:
        try:
            return _steps_at(runner, name, context, sizes)
        except (MemoryBudgetError, torch.OutOfMemoryError) as error:
            raise Skipped(str(error)) from error

    for name, values in setups(device, dtype, sizes.head_dim, without_graphs=True).items():
        with environment(**values):
            runner = TargetRunner(model)
            for context in sizes.contexts:
                stage.measure(f"{name}, {context:,} tokens", functools.partial(measured, runner, name, context))
                give_back(device)


def _steps_at(runner: TargetRunner, name: str, context: int, sizes: Sizes) -> Rows:
    nodes = max(sizes.nodes)
    full = filled(runner, context, nodes)
    partial = TrueCache(full, runner.new_store, partial_view(sizes.budget), 2 * (nodes + 1))
    every = Taps(queries=tuple(range(full.shape.layers)))
    asked = verify_trees(runner, full, [0], [star(1)], taps=every).queries
    partial.choose(0, {layer: q[0] for layer, q in asked.items()})
    found: Rows = []
    for size in sizes.nodes:
        row: dict[str, Any] = {
            "what": "steps", "setup": name, "context": context, "nodes": size, "budget": sizes.budget,
        }  # fmt: skip
        for kind, store in (("full", full), ("partial", partial.store)):
            ms = median_ms(
                lambda store=store, size=size: verify_trees(runner, store, [0], [star(size)], [context]),  # type: ignore[misc]
                sizes.repeats,
                graphs.USES + 2,
                runner.device,
            )
            limit = on_paper_ms(sizes, runner.device, size, store.lengths[0])
            row |= {f"{kind}_ms": ms, f"{kind}_paper_ms": limit, f"{kind}_ratio": limit and ms / limit}
        found.append(row)
    return found


def on_paper_ms(sizes: Sizes, device: torch.device, nodes: int, prefix: int) -> float | None:
    """The lower bound of benchmarks/gpu_on_paper.py for this GPU, in milliseconds; None for an unknown GPU."""
    if (card := peak(device)) is None:
        return None
    shape = sizes.model
    model = gpu_on_paper.Model(
        shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"], sizes.heads, sizes.kv_heads,
        sizes.head_dim, shape["vocab_size"],
    )  # fmt: skip
    cost = gpu_on_paper.forward(model, 1, nodes, prefix)
    return 1e3 * gpu_on_paper.seconds(cost, gpu_on_paper.Card(card.bandwidth, card.operations))
