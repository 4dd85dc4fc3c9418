"""Whether a method is ever slower than plain decoding, prompt by prompt, from the results files of `longdraft bench`.

    longdraft bench --data ... --methods ar,longspec:lookup=true --limit 8 --results greedy.jsonl
    longdraft bench --data ... --methods ar,longspec:lookup=true --limit 8 --temperature 1 --results drawn.jsonl
    python benchmarks/never_slower.py greedy.jsonl drawn.jsonl [--bar 0.97] [--json FILE]

A prompt's ratio: tokens/s of a method over that of ar, each the median of its rounds. Beside it stands how far ar's
own rounds lie apart (fastest over slowest): what a ratio means on a busy machine. Per method: prompts, the lowest
ratio, the share of prompts below the bar, the mean and the median.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from longdraft.bench import results
from longdraft.bench.run import Measured
from longdraft.bench.settings import REFERENCE


def ratios(file: Path) -> list[dict[str, Any]]:
    """One entry for each batch and method."""
    header, measured = results.read(file)
    temperature = header["settings"]["sampling"]["temperature"]
    found = []
    for m in measured:
        plain = m.tokens_per_second(REFERENCE)
        for name in m.rounds:
            own = m.tokens_per_second(name)
            if name == REFERENCE or own is None or plain is None:
                continue
            place = {"method": name, "dataset": m.dataset, "tokens": m.prompt_tokens[0], "temperature": temperature}
            found.append(place | {"ratio": own / plain, "apart": apart(m), "sample": m.samples[0]})
    return found


def apart(measured: Measured) -> float:
    """Plain decoding's fastest round over its slowest."""
    speeds = [s for s in (run.tokens_per_second for run in measured.rounds[REFERENCE]) if s is not None]
    return max(speeds) / min(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--bar", type=float, default=0.97)
    parser.add_argument("--worst", type=int, default=5, help="prompts to name")
    parser.add_argument("--json", type=Path, help="also write the ratios here")
    args = parser.parse_args()
    found = [entry for file in args.files for entry in ratios(file)]
    methods = list(dict.fromkeys(entry["method"] for entry in found))

    console = Console()
    table = Table("method", "prompts", "lowest", f"below {args.bar}", "mean", "median", box=None)
    for method in methods:
        own = [entry["ratio"] for entry in found if entry["method"] == method]
        below = sum(ratio < args.bar for ratio in own)
        figures = (f"{min(own):.2f}", f"{below}", f"{mean(own):.2f}", f"{median(own):.2f}")
        table.add_row(method, str(len(own)), *figures)
    console.print(table)

    worst = Table("method", "data", "tokens", "T", "ratio", "ar's rounds apart", box=None)
    for entry in sorted(found, key=lambda e: e["ratio"])[: args.worst]:
        worst.add_row(
            *(entry["method"], entry["dataset"], str(entry["tokens"]), f"{entry['temperature']:g}"),
            *(f"{entry['ratio']:.3f}", f"{entry['apart']:.2f}"),
        )
    console.print(worst)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
