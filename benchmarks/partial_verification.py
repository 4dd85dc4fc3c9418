"""What a partial verification costs against a full one, by context length, budget and tree size.

    python benchmarks/partial_verification.py [--context 7168 16384 32768] [--budget 512 1024 2048 4096]
        [--nodes 1 8 16] [--threads N] [--repeats N] [--json FILE]

The cache is filled with noise: what a forward costs does not depend on what the keys say. For each context length and
tree size, full and partial verifications are timed in turn, and a refresh: the full pass with a margin of tokens in
waiting, and the partial cache filled anew ("gather" is that part alone). Milliseconds, medians; "ratio" is partial /
full.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import longdraft
from longdraft.bench import machine
from longdraft.engine.partial import partial_view
from longdraft.memory.store import KVStore
from longdraft.model.runner import Taps, TargetRunner
from longdraft.views.cache import TrueCache

MARGIN = 20


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def filled(runner: TargetRunner, length: int, rows: int) -> KVStore:
    store = runner.new_store(1, length + rows)
    for layer in range(store.shape.layers):
        for rows_ in store.layer(layer):
            rows_.normal_()
    store.lengths[0] = length
    return store


def measured(
    runner: TargetRunner, length: int, budgets: list[int], nodes: int, margin: int, repeats: int
) -> list[dict[str, Any]]:
    """A row for each budget."""
    full = filled(runner, length, margin + 2 * nodes)
    tokens = [list(range(nodes))]
    # A star: every node a child of the root, as wide as a tree can be; the mask costs what any tree's does.
    depths = [[0, *[1] * (nodes - 1)]]
    mask = torch.eye(nodes, dtype=torch.bool)[None].clone()
    mask[:, :, 0] = True
    shape = {} if nodes < 3 else {"depths": depths, "mask": mask}
    every = Taps(queries=tuple(range(full.shape.layers)))

    def verify(store: KVStore) -> Any:
        return runner.forward(store.block([0], tokens, bases=[length], **shape), store)

    caches = {}
    looked = runner.forward(full.block([0], tokens, **shape), full, taps=every).queries
    queries = {layer: q[0] for layer, q in looked.items()}
    for budget in budgets:
        view = partial_view(budget, margin=margin)
        caches[budget] = TrueCache(full, runner.new_store, view, 2 * (nodes + 1))
        caches[budget].choose(0, queries)
    long = [list(range(margin + nodes))]
    times: dict[Any, list[float]] = {key: [] for key in ["full", "refresh", *budgets]}
    gathers: dict[int, list[float]] = {budget: [] for budget in budgets}
    for i in range(repeats + 1):  # the first one warms up
        found = {"full": milliseconds(lambda: verify(full))}
        found |= {budget: milliseconds(lambda b=budget: verify(caches[b].store)) for budget in budgets}  # type: ignore[misc]
        found["refresh"] = milliseconds(lambda: runner.forward(full.block([0], long), full, taps=every))
        gathered = {b: milliseconds(lambda b=b: caches[b].choose(0, queries)) for b in budgets}  # type: ignore[misc]
        for key, value in found.items() if i else ():
            times[key].append(value)
        for key, value in gathered.items() if i else ():
            gathers[key].append(value)
    whole, refresh = statistics.median(times["full"]), statistics.median(times["refresh"])
    return [
        {
            "context": length, "nodes": nodes, "budget": budget, "full_ms": whole,
            "partial_ms": statistics.median(times[budget]), "ratio": statistics.median(times[budget]) / whole,
            "refresh_ms": refresh + statistics.median(gathers[budget]), "gather_ms": statistics.median(gathers[budget]),
        }
        for budget in budgets
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=[7168, 16384, 32768])
    parser.add_argument("--budget", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16], help="Rows of a verification.")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    runner = TargetRunner(longdraft.load(options.model, dtype=options.dtype).model)
    rows = []
    for length in options.context:
        for nodes in options.nodes:
            rows += measured(runner, length, options.budget, nodes, MARGIN, options.repeats)
    table = Table("context", "rows", "full ms", "budget", "partial ms", "ratio", "refresh ms", "gather ms", box=None)
    for row in rows:
        table.add_row(
            f"{row['context']:,}", str(row["nodes"]), f"{row['full_ms']:.0f}", f"{row['budget']:,}",
            f"{row['partial_ms']:.0f}", f"{row['ratio']:.2f}", f"{row['refresh_ms']:.0f}", f"{row['gather_ms']:.0f}",
        )  # fmt: skip
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "hardware": machine.hardware()}, indent=2))


if __name__ == "__main__":
    main()
