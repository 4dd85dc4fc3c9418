"""What a verification costs on this machine, by rows and length of the text, and how near that is to reading memory.

    python benchmarks/verification.py [--context 64 2048 7168] [--rows 1 2 4 8 16 32 64] [--threads N] [--json FILE]

Milliseconds of a forward over a tree of so many rows, medians of runs that take turns, with our kernels (where there
are any) and without them; in brackets, over the plain step (one row). "bound" is what the
bytes that a plain step has to read, all weights and the KV of the text, take at the bandwidth measured in the same
run: a sum over half a gigabyte on the same threads.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import longdraft
from longdraft import native
from longdraft.bench import machine
from longdraft.model.runner import TargetRunner
from longdraft.native.library import SWITCH
from longdraft.planning.costs import CostTable, measure


def bandwidth() -> float:
    """Bytes a second that all threads read together."""
    numbers = torch.zeros(2**27)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return numbers.numel() * 4 / median(seconds)


def weight_bytes(model: nn.Module) -> int:
    """What of a model's weights a plain step reads: each of its tensors once."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.itemsize for t in tensors.values())


def table_of(model: Any, lengths: list[int], rows: list[int], ours: bool) -> CostTable:
    os.environ[SWITCH] = str(int(ours))
    found = measure(TargetRunner(model), lengths, rows)
    if found is None:
        raise SystemExit("Not even the shortest text fits the free memory.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--context", type=int, nargs="*", default=[64, 2048, 7168])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 12, 16, 32, 64])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    console = Console()
    model = longdraft.load(args.model, dtype="float32", device="cpu").model
    weights = weight_bytes(model)
    per_token = TargetRunner(model).kv_shape.bytes_per_token
    kinds = [("without", False)] if native.kernels() is None else [("kernels", True), ("without", False)]
    speeds = [bandwidth()]
    tables = {}
    for name, ours in kinds:
        console.print(f"{name}: {len(args.context)} lengths, {len(args.rows)} sizes ...")
        tables[name] = table_of(model, args.context, args.rows, ours)
        speeds.append(bandwidth())
    speed = median(speeds)

    columns = [(name, *pair) for name, t in tables.items() for pair in zip(t.lengths, t.seconds, strict=True)]
    out = Table("rows", *(f"{name}, {length:,}" for name, length, _ in columns), box=None)
    for i, rows in enumerate(args.rows):
        out.add_row(str(rows), *(f"{1e3 * s[i]:.1f} ({s[i] / s[0]:.2f})" for _, _, s in columns))
    bounds = [(weights + length * per_token) / speed for _, length, _ in columns]
    out.add_row("bound", *(f"{1e3 * x:.1f}" for x in bounds))
    out.add_row("plain / bound", *(f"{s[0] / x:.2f}" for (_, _, s), x in zip(columns, bounds, strict=True)))
    console.print(
        f"bandwidth {speed / 1e9:.1f} GB/s with {torch.get_num_threads()} threads; weights {weights / 1e6:.0f} MB"
    )
    console.print(out)
    if args.json:
        costs = {name: {"lengths": t.lengths, "rows": t.rows, "seconds": t.seconds} for name, t in tables.items()}
        about = {"hardware": machine.hardware(), "versions": machine.versions(), "bandwidth": speed, "weights": weights}
        args.json.write_text(json.dumps(about | costs, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
