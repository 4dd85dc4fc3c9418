"""The results of `longdraft bench` as one Markdown table: methods down, data sets across.

    longdraft bench --data a.jsonl --data b.jsonl --methods ar,longspec --results FILE
    python benchmarks/table.py FILE [--batch 1] [--json FILE]

A cell says mean accepted length, tokens/s, and the latter over that of ar, as docs/figures.md defines them. "draft" is
what the drafter holds in memory (its weights, its KV, views of the target's KV), "KV" the target's own cache and what
its verification keeps beside it: both as the bench's profile saw them, at the most tokens of any column.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from longdraft.bench import results
from longdraft.bench.report import rows
from longdraft.bench.run import Measured

MIB = 2**20


def held(measured: list[Measured]) -> dict[str, dict[str, int]]:
    """method -> holder -> bytes, the maximum over all profiles."""
    found: dict[str, dict[str, int]] = {}
    for m in measured:
        for name, profile in m.profiles.items():
            own = found.setdefault(name, {})
            for holder, size in profile["memory"].items():
                own[holder] = max(size, own.get(holder, 0))
    return found


def cell(row: dict[str, Any]) -> str:
    speed, ratio, length = row["tokens_per_second"], row["speedup_vs_ar"], row["mean_accepted_length"]
    if speed is None:
        return ""
    accepted = "" if length is None else f"{length:.2f}, "
    differ = f" ({row['mismatches']} of {row['samples']} differ)" if row["mismatches"] else ""
    return f"{accepted}{speed:.1f}, {ratio:.2f}x{differ}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    names: list[str] = []
    measured: list[Measured] = []
    for file in args.files:
        header, more = results.read(file)
        names += [name for name in header["settings"]["contenders"] if name not in names]
        measured += [m for m in more if m.batch == args.batch]
    # Files may hold different methods: each name's rows are those of the measurements that have it.
    found = [row for name in names for row in rows([name], [m for m in measured if name in m.rounds])]
    columns = list(dict.fromkeys((row["dataset"], row["context_tokens"]) for row in found))
    memory = held(measured)
    print("| method | " + " | ".join(f"{dataset}, {tokens:,}" for dataset, tokens in columns) + " | draft | KV |")
    print("|---" * (len(columns) + 3) + "|")
    for name in names:
        cells = {(row["dataset"], row["context_tokens"]): cell(row) for row in found if row["method"] == name}
        own = memory.get(name)
        sizes = [f"{own[holder] / MIB:.0f} MiB" if own else "" for holder in ("draft", "kv")]
        print(f"| `{name}` | " + " | ".join([*(cells.get(column, "") for column in columns), *sizes]) + " |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
