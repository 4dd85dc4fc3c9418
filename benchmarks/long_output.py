"""Long outputs from a short prompt, stretch by stretch.

    python benchmarks/long_output.py [--methods ar,prompt-lookup,longspec,eagle3] [--tokens 4096] [--stretch 512]
        [--prompt TEXT] [--temperature 0.8] [--seed 0] [-o lookup=true] [--dtype float32] [--json FILE]

Every method decodes the same prompt once, one after the other, past any end-of-sequence token. With a seed, all of
them give the same text; where they do not, a near tie turned round, and a line says where. For each stretch:
tokens/s, and new tokens / forwards of the target. Last: the speed of the last stretch over that of the second. An
option -o goes to the methods that have it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import longdraft
from longdraft.bench import machine
from longdraft.cli.options import method_options
from longdraft.methods import method

PROMPT = "Write a very long story about a lighthouse keeper who finds a map, chapter by chapter, with every detail."


def stretches(
    spec: longdraft.Speculator, prompt: str, tokens: int, size: int, **how: Any
) -> tuple[list[int], list[Any]]:
    """The output, and (tokens, seconds, forwards) of each stretch of ``size`` tokens."""
    found = [[0, 0.0, 0] for _ in range(-(-tokens // size))]
    output: list[int] = []
    for step in spec.stream(prompt, max_new_tokens=tokens, eos_token_ids=[], **how):
        if step.mode != "prefill":
            own = found[min(len(output), tokens - 1) // size]
            own[0] += len(step.token_ids)
            own[1] += step.seconds
            own[2] += 1
        output += step.token_ids
    return output, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="ar,prompt-lookup,longspec,eagle3")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--stretch", type=int, default=512)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--option", action="append", default=[], help="name=value")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    loaded = longdraft.load(args.model, dtype=args.dtype)
    sampling = longdraft.Sampling(temperature=args.temperature) if args.temperature else None
    count = -(-args.tokens // args.stretch)
    table = Table("method", "", *(f"{args.stretch * (i + 1):,}" for i in range(count)), "last / second", box=None)
    console = Console()
    found: list[dict[str, Any]] = []
    first: list[int] | None = None
    for name in args.methods.split(","):
        known = method(name).options
        given = method_options(name, [pair for pair in args.option if pair.partition("=")[0].strip() in known])
        spec = longdraft.Speculator(name, loaded.model, loaded.tokenizer, **given)
        spec.planner(console.print)
        console.print(f"{name}: {args.tokens:,} tokens ...")
        spec.generate(args.prompt, max_new_tokens=16)  # warms up
        output, parts = stretches(
            spec, args.prompt, args.tokens, args.stretch, sampling=sampling, seed=args.seed if sampling else None
        )
        speeds = [n / s for n, s, _ in parts]
        lengths = [n / f for n, _, f in parts]
        kept = speeds[-1] / speeds[1] if count > 1 else None
        table.add_row(name, "tokens/s", *(f"{x:.1f}" for x in speeds), "" if kept is None else f"{kept:.2f}")
        table.add_row("", "accepted", *(f"{x:.2f}" for x in lengths), "")
        first = first or output
        same = next((i for i, (a, b) in enumerate(zip(output, first, strict=True)) if a != b), None)
        if same is not None:
            console.print(f"{name}: another text than the first method's from token {same} on")
        found.append(
            {"method": name, "options": given, "tokens_per_second": speeds, "accepted": lengths, "differs_from": same}
        )
    console.print(table)
    if args.json:
        about = {"hardware": machine.hardware(), "versions": machine.versions(), "tokens": args.tokens}
        args.json.write_text(json.dumps(about | {"methods": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
