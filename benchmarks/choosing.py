"""What choosing a view's rows costs, beside a plain step of the target.

    python benchmarks/choosing.py [--context 16384 32768] [--budget 512] [--views chunks minmax ...] [--repeats 9]

Random keys and values; queries change a little from one choice to the next, so some chunks stay. Milliseconds, medians,
and in brackets shares of a plain step on the same text: a choice with its copying, the choice alone, a draft forward on
the view; "first" has all summaries to make. The last line is SpecPV's partial cache of 1,024 tokens, by eight queries.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

import longdraft
from longdraft.drafters.self_drafter import self_view
from longdraft.engine.partial import partial_view
from longdraft.model.runner import TargetRunner
from longdraft.views.cache import TrueCache

VIEWS = ("streaming", "chunks", "minmax", "quest", "tokens", "attention", "snapkv")


def milliseconds(what: Callable[..., Any], *arguments: Any, **named: Any) -> float:
    start = time.perf_counter()
    what(*arguments, **named)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--views", nargs="+", default=VIEWS)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    model, _ = longdraft.load(rope_factor=max(options.context) / 4096)
    runner = TargetRunner(model)
    views = {name: replace(self_view(name, options.budget, None, None, None), room=128) for name in options.views}
    views["specpv"] = partial_view(1024)
    for length in options.context:
        full = runner.new_store(1, length + 1)
        for rows in (full.keys, full.values):
            rows.normal_()
        full.lengths[0] = length
        step = partial(runner.forward, full.block([0], [[5]]), full, check=False)
        plain = median(milliseconds(step) for _ in range(options.repeats))
        print(
            f"{length:,} tokens: a plain step {plain:.1f} ms; 1 is a step\n{'view':>10} first  choice  alone  forward"
        )
        for name, view in views.items():
            cache = TrueCache(full, partial(runner.new_store, resident=True), view, 1)
            looks = 8 if name == "specpv" else max(1, view.query_count)
            queries = torch.randn(full.shape.layers, model.config.num_attention_heads, looks, full.shape.head_dim)
            first = milliseconds(cache.choose, 0, queries)
            whole, alone = [], []
            for _ in range(options.repeats):
                queries = queries + 0.3 * torch.randn(queries.shape)
                whole.append(milliseconds(cache.choose, 0, queries))
                alone.append(milliseconds(cache._chosen, 0, length, queries))
            block = cache.store.block([0], [[5]], bases=[length])
            drafted = [milliseconds(runner.forward, block, cache.store, check=False) for _ in range(options.repeats)]
            cells = (first, median(whole), median(alone), median(drafted))
            print(f"{name:>10} " + "  ".join(f"{x:.1f} ({x / plain:.2f})" for x in cells), flush=True)


if __name__ == "__main__":
    main()
