"""Compares stored weights with the same weights in float32, and with other libraries, in one run.

    python benchmarks/stored_weights.py --data FOLDER [--parts steps verification prefill methods memory]
        [--peers hf llama-cpp] [--rows 4 5 6 7] [--repeats N] [--model M] [--json FILE]

FOLDER has govreport_8K.jsonl and so on, rows with `text`. Everything that is compared takes turns; times are medians of
the turns, ratios those of two such medians on the same prompt, and geometric means of the prompts.

steps         plain decoding at each length of --context, and what its bytes take to read: the weights and the text's KV
              at the bandwidth of this run (a sum over half a gigabyte on the same threads)
methods       plain decoding and the default method on whole prompts of 1K to 7K tokens
verification  of so many rows, in plain steps of the same weights and in those of float32
prefill       from nothing to the first token
memory        of `longdraft generate` at 1K tokens: the most that was resident, less what was after the imports
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import longdraft
from longdraft import LoadedModel, PromptCache, Sampling, Speculator
from longdraft.bench import machine
from longdraft.bench.contenders import Job, Kept, Ours
from longdraft.bench.data import Sample, fitted, read
from longdraft.bench.peers import PEERS
from longdraft.bench.prompts import grid, prepare
from longdraft.bench.run import Bench, Measured
from longdraft.bench.settings import REFERENCE, Settings
from longdraft.model.runner import TargetRunner
from longdraft.planning.costs import measure

WEIGHTS = STORED, FLOAT32 = ("stored", "float32")
DEFAULT = "default"
PARTS = ("steps", "verification", "prefill", "methods", "memory")
LENGTHS = ("1K", "2K", "4K", "8K")
OVER = {  # what each is set against, in this order
    "ar": ("ar, float32", "hf", "llama-cpp"),
    "ar, float32": ("hf",),
    DEFAULT: (f"{DEFAULT}, float32", "hf", "llama-cpp"),
    f"{DEFAULT}, float32": ("hf",),
}
MIB = 2**20
# Runs in a process of its own, whose arguments are those of the command line.
GENERATE = """
import json, sys, torch, transformers
from longdraft.bench import machine
from longdraft.cli.main import main
place = torch.device("cpu")
assert machine.forget_peak(place), "this system does not start a process's peak anew"
before = machine.peak_bytes(place)
code = main(sys.argv[1:])
print(json.dumps({"code": code, "imports": before, "peak": machine.peak_bytes(place)}))
"""

Models = dict[str, LoadedModel]
console = Console(width=None if sys.stdout.isatty() else 180)  # tables in a file are as wide as they are


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
    """Bytes of weights that a plain step reads: each tensor once."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.itemsize for t in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=["hf"])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 5, 6, 7], help="of each file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="new ones of a prompt")
    parser.add_argument("--context", type=int, nargs="+", default=[64, 256, 1024, 7168], help="of steps")
    parser.add_argument(
        "--verify", type=int, nargs="+", default=[64, 2048, 7168, 16384], help="lengths of verification"
    )
    parser.add_argument("--verify-rows", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--prefill", type=int, default=7168, help="tokens")
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found: dict[str, Any] = {"hardware": machine.hardware(), "versions": machine.versions(), "settings": str(args)}
    models = {} if set(args.parts) <= {"memory", "verification"} else loaded(args)
    for part in dict.fromkeys(args.parts):
        console.rule(part)
        found[part] = globals()[part](args, models)
        if args.json:  # whatever comes later
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def loaded(args: Any, **how: Any) -> Models:
    return {w: longdraft.load(args.model, device="cpu", weights=w, progress=console.print, **how) for w in WEIGHTS}


def samples(folder: Path, rows: Sequence[int], *names: str) -> list[Sample]:
    return [read([folder / f"{name}.jsonl"])[row] for name in names for row in rows]


def steps(args: Any, models: Models) -> dict[str, Any]:
    peers = [name for name in args.peers if "lookup" not in name and "assisted" not in name]
    speeds = [bandwidth()]
    measured = raced(
        args, models, samples(args.data, args.rows, "govreport_8K"), (REFERENCE,), peers, tuple(args.context), raw=True
    )
    speeds.append(bandwidth())
    shown, columns = table(measured)
    speed = median(speeds)
    for weights, loaded in models.items():
        name = titled(REFERENCE, weights)
        size, per_token = weight_bytes(loaded.model), TargetRunner(loaded.model).kv_shape.bytes_per_token
        bounds, over = [], []
        for own in columns.values():
            tokens = median(m.prompt_tokens[0] for m in own) + args.tokens / 2
            bounds.append((size + tokens * per_token) / speed)
            over.append(1 / median(filter(None, (m.tokens_per_second(name) for m in own))) / bounds[-1])
        shown.add_row(f"bound, {weights} ({size / 1e6:.0f} MB), ms", *(f"{1e3 * x:.2f}" for x in bounds))
        shown.add_row(f"{name} / bound", *(f"{x:.2f}" for x in over))
    console.print(f"bandwidth {speed / 1e9:.1f} GB/s with {torch.get_num_threads()} threads")
    console.print(shown)
    return {"bandwidth": speed, "prompts": as_json(measured)}


def methods(args: Any, models: Models) -> dict[str, Any]:
    files = (f"{kind}_{length}" for length in LENGTHS for kind in ("govreport", "pg19"))
    texts = samples(args.data, args.rows, *files)
    measured = raced(args, models, texts, (REFERENCE, DEFAULT), args.peers, (7168,))
    console.print(table(measured)[0])
    return {"prompts": as_json(measured)}


def raced(
    args: Any,
    models: Models,
    texts: Sequence[Sample],
    names: Sequence[str],
    peers: Sequence[str],
    contexts: tuple[int, ...],
    raw: bool = False,
) -> list[Measured]:
    """Methods on both kinds of weights, and peers, prompt by prompt."""
    extra = []
    for weights, loaded in models.items():
        kept = Kept(PromptCache())
        for name in names:
            if (name, weights) != (REFERENCE, STORED):  # which a bench has anyway
                spec = Speculator(None if name == DEFAULT else name, loaded.model, loaded.tokenizer)
                spec.planner(console.print)
                extra.append(Ours(titled(name, weights), spec, kept))
    settings = Settings(tuple(peers), args.tokens, contexts, repeats=args.repeats, raw=raw, ignore_eos=True)
    bench = Bench(models[STORED], settings, extra, console.print, lambda: models[FLOAT32])
    groups, _ = grid(prepare(texts, models[STORED], settings), settings)
    bench.wake(groups[0][0])
    measured = []
    for i, group in enumerate(groups, 1):
        console.print(f"{i} of {len(groups)}: {group[0].sample.origin}, {len(group[0].tokens):,} tokens ...")
        measured.append(bench.measure(group))
        for d in measured[-1].disagreements:
            kind = "near tie" if d.difference.near_tie else "MISMATCH"
            console.print(f"{kind}: {d.method}, new token {d.difference.position + 1}")
    for name, note in bench.notes.items():
        console.print(f"{name}: {note}")
    return measured


def titled(name: str, weights: str) -> str:
    return name if weights == STORED else f"{name}, {weights}"


def table(measured: Sequence[Measured]) -> tuple[Table, dict[str, list[Measured]]]:
    """tokens/s of each column's prompts, and ratios; and the columns."""
    columns: dict[str, list[Measured]] = {}
    contexts = len({m.context for m in measured}) > 1
    for m in measured:
        columns.setdefault(f"{m.context:,} tokens" if contexts else m.dataset, []).append(m)
    made = Table("tokens/s, median", *columns, "all", box=None)
    each = [*columns.values(), list(measured)]
    speeds = {name: [[m.tokens_per_second(name) or 0.0 for m in own] for own in each] for name in measured[0].rounds}
    for name, own in speeds.items():
        made.add_row(name, *(f"{median(x):.1f}" for x in own))
    made.add_section()
    pairs = [(name, other) for name, others in OVER.items() for other in others]
    for name, other in (pair for pair in pairs if speeds.keys() >= set(pair)):
        ratios = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(speeds[name], speeds[other], strict=True)]
        made.add_row(f"{name} / {other}", *(f"{exp(mean(map(log, x))):.2f} ({min(x):.2f})" for x in ratios))
    made.caption = "in brackets: the lowest of the prompts"
    return made, columns


def as_json(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    return [
        {
            "sample": m.samples[0],
            "tokens": m.prompt_tokens[0],
            "tokens_per_second": {name: [run.tokens_per_second for run in runs] for name, runs in m.rounds.items()},
            "first_token_seconds": {name: run.first_token_seconds for name, run in m.cold.items()},
            "accepted": {name: runs[0].mean_accepted_length for name, runs in m.rounds.items()},
            "differences": [(d.method, d.difference.near_tie) for d in m.disagreements],
        }
        for m in measured
    ]


def verification(args: Any, _: Models) -> dict[str, Any]:
    rows = (1, *sorted(args.verify_rows))
    models = loaded(args)
    limit = TargetRunner(models[STORED].model).context_length
    longest = max(args.verify) + rows[-1]
    if longest > limit:  # what a forward costs does not depend on where RoPE turns its keys
        models = loaded(args, rope_factor=longest / limit)
    runners = {w: TargetRunner(own.model) for w, own in models.items()}
    seconds: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for turn in range(args.repeats):
        for length in args.verify:
            for weights in WEIGHTS if turn % 2 == 0 else reversed(WEIGHTS):
                if (costs := measure(runners[weights], [length], rows)) is None:
                    raise SystemExit(f"A text of {length:,} tokens does not fit the free memory.")
                seconds.setdefault((weights, length), []).append(costs.seconds[0])
    medians = {place: [median(turns) for turns in zip(*own, strict=True)] for place, own in seconds.items()}
    shown = Table("rows", *(f"{n:,}, {w}" for n in args.verify for w in WEIGHTS), box=None)
    places = [(weights, length) for length in args.verify for weights in WEIGHTS]
    for i, count in enumerate(rows):
        cells = []
        for weights, length in places:
            own, plain = medians[weights, length][i], medians[weights, length][0]
            cells.append(f"{1e3 * own:.1f} ({own / plain:.2f}, {own / medians[FLOAT32, length][0]:.2f})")
        shown.add_row(str(count), *cells)
    shown.caption = "ms (in plain steps of the same weights, in those of float32)"
    console.print(shown)
    return {"rows": rows, "seconds": {f"{weights}, {length}": own for (weights, length), own in seconds.items()}}


def prefill(args: Any, models: Models) -> dict[str, Any]:
    (text,) = samples(args.data, args.rows[:1], "govreport_8K")
    ids = tuple(fitted(text, models[STORED].tokenizer, args.prefill, raw=True))
    job = Job((ids,), 2, Sampling(), 0, frozenset())
    readers = {w: Ours(w, Speculator("ar", own.model), Kept(PromptCache())) for w, own in models.items()}
    seconds: dict[str, list[float]] = {w: [] for w in WEIGHTS}
    for turn in range(args.repeats + 1):
        for weights in WEIGHTS if turn % 2 == 0 else reversed(WEIGHTS):
            run = readers[weights].cold(job)
            if turn:  # the first one wakes it up
                seconds[weights].append(run.first_token_seconds)
    found = {w: median(own) for w, own in seconds.items()}
    said = ", ".join(f"{w} {own:.2f} s" for w, own in found.items())
    console.print(f"{len(ids):,} tokens: {said}; float32 / stored {found[FLOAT32] / found[STORED]:.2f}")
    return {"tokens": len(ids), "seconds": seconds}


def memory(args: Any, _: Models) -> dict[str, Any]:
    (text,) = samples(args.data, args.rows[:1], "govreport_1K")
    model = ["--model", args.model] if args.model else []
    found = {}
    for weights, name in [(weights, name) for weights in WEIGHTS for name in (REFERENCE, DEFAULT)]:
        method = [] if name == DEFAULT else ["--method", name]
        command = ["generate", "-p", text.document, "-n", str(args.tokens), "--device", "cpu", "--json"]
        command += ["--weights", weights]
        for _turn in range(2):  # a first one may measure what verifications cost, which is kept
            ran = subprocess.run(
                [sys.executable, "-c", GENERATE, *command, *method, *model],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            if ran.returncode:
                raise SystemExit(ran.stderr)
        generated, peak = map(json.loads, ran.stdout.splitlines()[-2:])
        found[titled(name, weights)] = own = {**peak, "prompt_tokens": generated["prompt_tokens"]}
        imports, above = own["imports"] / MIB, (own["peak"] - own["imports"]) / MIB
        tokens = f"{own['prompt_tokens']:,} + {args.tokens} tokens"
        console.print(f"{titled(name, weights)}: {above:.0f} MiB above the imports ({imports:.0f} MiB) at {tokens}")
    return found


if __name__ == "__main__":
    main()
