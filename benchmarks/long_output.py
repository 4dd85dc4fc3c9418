"""Long outputs from a short prompt, stretch by stretch.

    python benchmarks/long_output.py [--methods ar,prompt-lookup,longspec,eagle3] [--tokens 4096] [--stretch 512]
        [--prompt TEXT] [--temperature 0.8] [--min-p P] [--repetition-penalty X] [--repetition-window N] [--seed 0]
        [-o lookup=true] [--plan fixed] [--draft DIR] [--dtype float32] [--json FILE]

Every method decodes the same prompt once, one after the other, past any end-of-sequence token. With a seed, all of
them give the same text; where they do not, a near tie turned round, and a line says where. For each stretch:
tokens/s, and new tokens / forwards of the target. Last: the speed of the last stretch over that of the second, and over
all of the output: tokens/s, mean accepted length, and tokens/s over the first method's. Options of one method stand
behind colons (tokenswift:reuse=false:view=none); one given with -o goes to the methods that have it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

import longdraft
from longdraft.bench import machine
from longdraft.cli.options import method_options
from longdraft.methods import method, method_of

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
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--repetition-window", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--option", action="append", default=[], help="name=value")
    parser.add_argument("--plan", help="fixed: the methods' own trees")
    parser.add_argument("--draft", help="draft folder, for the methods that take its kind")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    loaded = longdraft.load(args.model, dtype=args.dtype)
    sampling = longdraft.Sampling(
        temperature=args.temperature,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        repetition_window=args.repetition_window,
    )
    kind = method_of(args.draft).draft_kind if args.draft else None
    count = -(-args.tokens // args.stretch)
    ends = [f"{args.stretch * (i + 1):,}" for i in range(count)]
    table = Table(Column("method", no_wrap=True), "", *ends, "last / second", "all", "x", box=None)
    console = Console()
    found: list[dict[str, Any]] = []
    first: list[int] | None = None
    for name in args.methods.split(","):
        plain, *pairs = name.split(":")
        known = method(plain).options
        shared = [pair for pair in args.option if pair.partition("=")[0].strip() in known]
        given = method_options(plain, [*shared, *pairs])
        if kind is not None and kind == method(plain).draft_kind:
            given["draft"] = args.draft
        spec = longdraft.Speculator(plain, loaded.model, loaded.tokenizer, plan=args.plan, **given)
        spec.planner(console.print)
        console.print(f"{name}: {args.tokens:,} tokens ...")
        spec.generate(args.prompt, max_new_tokens=16)  # warms up
        output, parts = stretches(spec, args.prompt, args.tokens, args.stretch, sampling=sampling, seed=args.seed)
        speeds = [n / s for n, s, _ in parts]
        lengths = [n / f for n, _, f in parts]
        kept = speeds[-1] / speeds[1] if count > 1 else None
        tokens, seconds, forwards = (sum(part) for part in zip(*parts, strict=True))
        whole = tokens / seconds
        ratio = whole / found[0]["whole"] if found else 1.0
        last = "" if kept is None else f"{kept:.2f}"
        table.add_row(name, "tokens/s", *(f"{x:.1f}" for x in speeds), last, f"{whole:.1f}", f"{ratio:.2f}")
        table.add_row("", "accepted", *(f"{x:.2f}" for x in lengths), "", f"{tokens / forwards:.2f}", "")
        first = first or output
        same = next((i for i, (a, b) in enumerate(zip(output, first, strict=True)) if a != b), None)
        if same is not None:
            console.print(f"{name}: another text than the first method's from token {same} on")
        found.append(
            {
                "method": name,
                "options": {k: str(x) for k, x in given.items()},
                "tokens_per_second": speeds,
                "accepted": lengths,
                "differs_from": same,
                "whole": whole,
                "ratio": ratio,
                "mean_accepted_length": tokens / forwards,
            }
        )
    console.print(table)
    if args.json:
        about = {"hardware": machine.hardware(), "versions": machine.versions(), "tokens": args.tokens}
        args.json.write_text(json.dumps(about | {"methods": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
