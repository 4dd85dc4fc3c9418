"""What a level of a draft costs beside a plain step of the target.

    python benchmarks/draft_level.py [FILE] [--methods longspec eagle3] [--context 1024] [--widths 1 8 16]
        [--weights float32] [--profile]

One text, which plain decoding and the drafts continue in turn, a step of each at a time. A draft grows beam trees of
--levels levels of so many nodes. "level" is the time of a whole proposal (the draft's forwards, the choice of nodes,
the finished tree) over its levels; ratios are of medians, in percent of a plain step. "CPU" is the time that the
threads computed, which says something where others use the machine too. FILE is JSONL as `longdraft bench --data` takes
it; without it, the text repeats this file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import longdraft
from longdraft.bench.data import fitted, read

Seconds = tuple[float, float]  # by the clock, and of all threads


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(start: Seconds) -> Seconds:
    end = now()
    return end[0] - start[0], end[1] - start[1]


def proposals(spec: longdraft.Speculator, prompt: list[int], steps: int) -> Iterator[Seconds]:
    """Seconds of each round's proposal; of the whole step where nothing is proposed."""
    run = spec.stream([prompt], max_new_tokens=40 * steps, eos_token_ids=[])
    drafter = run._engine.drafter
    taken: list[Seconds] = []
    propose = drafter.propose

    def timed(*arguments: Any) -> Any:
        start = now()
        found = propose(*arguments)
        taken.append(since(start))
        return found

    drafter.propose = timed  # type: ignore[method-assign]
    start = now()
    for step in run:
        if step.mode != "prefill":
            yield since(start) if spec.method.name == "ar" else taken[-1]
        start = now()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--methods", nargs="*", default=["longspec", "eagle3"])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--weights", choices=["float32", "stored"], default="float32", help="of the target")
    parser.add_argument("--profile", action="store_true", help="say what torch's operators take, too")
    options = parser.parse_args()
    model, tokenizer = longdraft.load(weights=options.weights)
    if options.file:
        prompt = fitted(read([options.file], 1)[0], tokenizer, options.context)
    else:
        text = Path(__file__).read_text(encoding="utf-8")
        prompt = (tokenizer(text)["input_ids"] * options.context)[: options.context]
    specs = {"plain": longdraft.Speculator("ar", target=model, tokenizer=tokenizer)}
    for method in options.methods:
        for width in options.widths:
            widths = (width,) * options.levels
            specs[f"{method}, {width}"] = longdraft.Speculator(
                method, target=model, tokenizer=tokenizer, plan="fixed", widths=widths
            )
    runs = {name: proposals(spec, prompt, options.steps + 2) for name, spec in specs.items()}
    seconds: dict[str, list[Seconds]] = {name: [] for name in specs}
    for turn in range(options.steps + 2):
        for name, run in runs.items():
            found = next(run)
            if turn > 1:  # the first ones find caches cold
                seconds[name].append(found)
    medians = {name: [1e3 * median(x) for x in zip(*found, strict=True)] for name, found in seconds.items()}
    plain = medians.pop("plain")
    threads = torch.get_num_threads()
    print(f"{len(prompt)} tokens; a plain step takes {plain[0]:.2f} ms, CPU {plain[1]:.2f}; {threads} threads")
    print(f"{'draft, nodes':>14} {'level, ms':>10} {'of a step':>10} {'CPU':>10} {'of a step':>10}")
    for name, found in medians.items():
        wall, cpu = (x / options.levels for x in found)
        print(f"{name:>14} {wall:10.2f} {wall / plain[0]:10.1%} {cpu:10.2f} {cpu / plain[1]:10.1%}")
    if options.profile:
        for name in medians:
            with torch.profiler.profile() as profile:
                for _ in range(5):
                    next(runs[name])
            print(name, profile.key_averages().table("self_cpu_time_total", row_limit=25, max_name_column_width=40))
    print(json.dumps({"context": len(prompt), "threads": threads, "plain": plain} | medians))


if __name__ == "__main__":
    main()
