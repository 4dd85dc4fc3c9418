"""What a forward on a view costs, and choosing its rows, by what the view's keys and values are rounded to.

    python benchmarks/view_dtypes.py [--context 7168] [--budget 512 2048 4096] [--rows 1 3 8] [--view streaming]
        [--repeats 31]

Forwards on random keys and values, alternating; milliseconds of one (median), and in brackets the median of its ratios
to the run beside it in float32. Choosing: the best of four.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from statistics import median

import torch

import longdraft
from longdraft.drafters.self_drafter import self_view
from longdraft.model.runner import TargetRunner
from longdraft.views.cache import TrueCache
from longdraft.views.view import DTYPES


def seconds(what, *args, **named) -> float:
    start = time.perf_counter()
    what(*args, **named)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=7168, help="tokens of the text")
    parser.add_argument("--budget", type=int, nargs="*", default=[512, 2048, 4096])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 3, 8], help="of a forward")
    parser.add_argument("--view", default="streaming")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    model, _ = longdraft.load()
    runner = TargetRunner(model)
    full = runner.new_store(1, options.context + 8)
    for rows in (full.keys, full.values):
        rows.normal_()
    full.lengths[0] = options.context
    print(f"{'budget':>7} {'':>9} {'choosing':>9}" + "".join(f"{rows:>9} rows" for rows in options.rows))
    for budget in options.budget:
        view = replace(self_view(options.view, budget, None, None, None), room=max(64, budget // 4))
        queries = torch.randn(full.shape.layers, 9, max(1, view.query_count), full.shape.head_dim)
        caches = {}
        for name, dtype in DTYPES.items():
            new_store = partial(runner.new_store, resident=True, dtype=dtype)
            caches[name] = TrueCache(full, new_store, view, max(options.rows) + 1)
        chosen = {name: min(seconds(c.choose, 0, queries) for _ in range(4)) for name, c in caches.items()}
        cells: dict[str, list[str]] = {name: [] for name in caches}
        for rows in options.rows:
            taken: dict[str, list[float]] = {name: [] for name in caches}
            for _ in range(options.repeats):
                for name, cache in caches.items():
                    block = cache.store.block([0], [list(range(rows))], bases=[options.context])
                    taken[name].append(seconds(runner.forward, block, cache.store, check=False))
            for name, own in taken.items():
                ratio = median(a / b for a, b in zip(own, taken["float32"], strict=True))
                cells[name].append(f"{1e3 * median(own):7.1f} ({ratio:.2f})")
        for name, row in cells.items():
            print(f"{budget:7} {name:>9} {1e3 * chosen[name]:9.1f}" + "".join(row), flush=True)


if __name__ == "__main__":
    main()
