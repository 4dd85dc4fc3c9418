"""Measures longdraft and other engines on the same GGUF files, in turns, and prints where we stand.

    python benchmarks/real_models.py --model NAME=PATH.gguf [--model ...] --llama-bench PATH/llama-bench
        [--ik-bench PATH/llama-bench] [--openvino PATH/python]
        --prompts FOLDER_OR_JSONL... [--rows plain prompt verify default] [--lengths 512 4096 16384]
        [--repeats 3] [--json OUT] [--fresh]

Engines: llama.cpp, and where they are named ik_llama.cpp and OpenVINO GenAI (engines.py). ratio: over the best of them.

With --json, a cell that is finished is in OUT at once, and is not measured again by a later run with the same settings
unless --fresh is given: a run that was interrupted goes on where it was. Rows of the table:

plain         tokens/s of decoding one token after the other at a context of so many tokens: ours a greedy forward of
              one row a token, behind a KV store that is filled with random numbers (--real-kv: by reading a text);
              llama.cpp by llama-bench -p 0 -n STEPS -d CONTEXT -fa 1. Medians of turns.
prompt        tokens/s of reading a prompt of random tokens, to its first new token; llama-bench -p TOKENS -n 0.
verify        seconds of a forward over a chain of so many rows, over those of a plain step of one row. Medians.
default       decode tokens/s (new tokens / decode seconds, prefill excluded) of the default method at T = 0 on prompts
              of real text, end of sequence ignored; against `ar`, our plain decoding, on the same prompts in the same
              process, and against the engines' plain decoding at the median length of the file's prompts, before and
              after them. A prompt's rate is the median of its repeats; a file's the geometric mean of its prompts.
              mean accepted length: new tokens / target verification forwards, bonus included, prefill's token not
              counted; `ar` is 1.0. different: prompts whose text was not that of `ar`.
other_cores   cores that other processes took while ours was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import psutil
import torch
from engines import Engine, LlamaBench, OpenVino
from rich.console import Console
from rich.table import Table

import longdraft
from longdraft import LoadedModel, PromptCache, Speculator
from longdraft.bench import machine
from longdraft.bench.tasks import load_samples
from longdraft.engine.verifier import verify_trees
from longdraft.memory.store import KVStore
from longdraft.metrics import average
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import chain

Cell = dict[str, Any]
Cells = Iterator[tuple[str, str, Callable[[], Cell]]]

FILLED, WARM_UP = 1024, 3  # rows of a KV store that are filled at a time; tokens of a warm-up
# Settings that a cell depends on, besides its file.
SETTINGS = (
    "threads", "arithmetic", "repeats", "steps", "new_tokens", "real_kv", "verify_rows", "verify_turns", "data_rows",
    "prompt_tokens", "engines",
)  # fmt: skip
console = Console(width=None if sys.stdout.isatty() else 200)


class OtherProcesses:
    """Measures how many cores other processes keep busy, from its creation on."""

    def __init__(self) -> None:
        self._start = self._usage()

    @property
    def cores(self) -> float:
        elapsed, busy, own = (now - before for now, before in zip(self._usage(), self._start, strict=True))
        return max(0.0, busy - own) / elapsed

    @staticmethod
    def _usage() -> tuple[float, float, float]:
        """The clock, work of all cores, and work of this process, in seconds."""
        times, own = psutil.cpu_times()._asdict(), os.times()
        # Guests' seconds are counted among user's.
        busy = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        return time.perf_counter(), float(busy), own.user + own.system


class Model:
    """A GGUF file, and how it is measured.

    Attributes:
        engines: name -> engine to measure beside it.
    """

    def __init__(self, path: Path, args: Any) -> None:
        self.path, self.args = path, args
        self.engines: dict[str, Engine] = {"llama": LlamaBench(args.llama_bench, path, args.threads)}
        if args.ik_bench:
            self.engines["ik"] = LlamaBench(args.ik_bench, path, args.threads, ik=True)
        if args.openvino:
            self.engines["openvino"] = OpenVino(args.openvino, path, args.threads)

    @cached_property
    def loaded(self) -> LoadedModel:
        return longdraft.load(self.path, device="cpu", arithmetic=self.args.arithmetic, progress=console.print)

    @cached_property
    def runner(self) -> TargetRunner:
        return TargetRunner(self.loaded.model)

    def text(self, tokens: int) -> list[int]:
        """Token ids of a made-up text, always the same."""
        made = torch.Generator().manual_seed(tokens)
        return torch.randint(self.runner.vocab_size, (tokens,), generator=made).tolist()

    def prompts(self, file: str) -> list[list[int]]:
        """Prompts of a file that have a length that was asked for and fit the context."""
        shortest, longest = self.args.prompt_tokens
        longest, samples = min(longest, self.runner.context_length - self.args.new_tokens), load_samples([file])
        rows = [samples[i] for i in self.args.data_rows if i < len(samples)]
        found = [list(sample.encode(self.loaded.tokenizer)) for sample in rows]
        return [tokens for tokens in found if shortest <= len(tokens) <= longest]

    def filled(self, length: int) -> KVStore:
        """A store of a made-up text of so many tokens: random keys and values, or with --real-kv those of the text."""
        store = self.runner.new_store(1, length + self.args.steps + max(self.args.verify_rows))
        tokens, shape = self.text(length), store.shape
        for start in range(0, length, FILLED):
            rows = tokens[start : start + FILLED]
            if self.args.real_kv:
                self.runner.forward(store.make_forward_batch([0], [rows], is_prefill=True), store, logits="none")
            else:
                kv = torch.randn(2, shape.layers, shape.kv_heads, len(rows), shape.head_dim).to(shape.dtype)
                store.write_entries(0, start, *kv)
            store.commit(0, range(len(rows)))
        return store


def in_turns(model: Model, theirs: Callable[[Engine], float], ours: Callable[[], float]) -> Cell:
    """Tokens a second of the engines and of ours, one after the other: medians, and ours over the best."""
    rates: dict[str, list[float]] = {"ours": [], **{name: [] for name in model.engines}}
    busy = []
    for turn in range(model.args.repeats):
        console.print(f"  turn {turn + 1} of {model.args.repeats}: {', '.join(model.engines)}, then ours")
        for name, engine in model.engines.items():
            rates[name].append(theirs(engine))
        others = OtherProcesses()
        rates["ours"].append(ours())
        busy.append(others.cores)
    found = {name: median(own) for name, own in rates.items()}
    best = max(rate for name, rate in found.items() if name != "ours")
    return {**found, "ratio": found["ours"] / best, "turns": rates, "other_cores": max(busy)}


def plain(model: Model, length: int) -> Cell:
    steps, store = model.args.steps, model.filled(length)
    decoding(model, store, WARM_UP)
    return in_turns(model, lambda engine: engine.writes(steps, length), lambda: steps / decoding(model, store, steps))


def decoding(model: Model, store: KVStore, steps: int) -> float:
    """Seconds of greedy decoding behind a store's text, which is left as it was."""
    length, token = store.lengths[0], 1
    start = time.perf_counter()
    for _ in range(steps):
        logits = verify_trees(model.runner, store, [0], [chain(token, ())]).logits
        assert logits is not None
        token = int(logits[0, 0].argmax())
        store.commit(0, [0])
    seconds = time.perf_counter() - start
    store.truncate(0, length)
    return seconds


def prompt(model: Model, length: int) -> Cell:
    spec = Speculator("ar", model.loaded.model, model.loaded.tokenizer)

    def ours() -> float:
        (result,) = spec.generate([model.text(length)], max_new_tokens=1, eos_token_ids=[])
        return length / result.prefill_seconds

    spec.generate([model.text(64)], max_new_tokens=2, eos_token_ids=[])
    return in_turns(model, lambda engine: engine.reads(length), ours)


def verify(model: Model, length: int) -> Cell:
    store, others = model.filled(length), OtherProcesses()
    seconds: dict[int, list[float]] = {rows: [] for rows in (1, *model.args.verify_rows)}
    for turn in range(-1, model.args.verify_turns):
        for rows, own in seconds.items():
            start = time.perf_counter()
            verify_trees(model.runner, store, [0], [chain(1, range(1, rows))])
            if turn >= 0:  # the first turn warms up
                own.append(time.perf_counter() - start)
    step = median(seconds[1])
    over = {str(rows): median(own) / step for rows, own in seconds.items() if rows > 1}
    return {"step_seconds": step, "over_step": over, "other_cores": others.cores}


def default(model: Model, file: str) -> Cell:
    if not (prompts := model.prompts(file)):
        return {"skipped": "no prompt of these lengths"}
    _, spec = specs = [Speculator(name, model.loaded.model, model.loaded.tokenizer) for name in ("ar", None)]
    spec.planner()
    for each in specs:  # what only a first run does
        each.generate([model.text(64)], max_new_tokens=8, eos_token_ids=[])
    new, depth = model.args.new_tokens, int(median(map(len, prompts)))
    theirs = {name: [engine.writes(new, depth)] for name, engine in model.engines.items()}
    others, found = OtherProcesses(), []
    for i, tokens in enumerate(prompts, 1):
        console.print(f"  prompt {i} of {len(prompts)}: {len(tokens):,} tokens")
        cache = PromptCache()
        runs: dict[str, list[longdraft.Result]] = {"ar": [], "default": []}
        for _ in range(model.args.repeats):
            for own, each in zip(runs.values(), specs, strict=True):
                own += each.generate([tokens], max_new_tokens=new, eos_token_ids=[], cache=cache)
        texts = {tuple(run.token_ids) for own in runs.values() for run in own}
        figures = {name: _figures(own) for name, own in runs.items()}
        found.append({**figures, "prompt_tokens": len(tokens), "same_tokens": len(texts) == 1})
    busy = others.cores
    for name, engine in model.engines.items():
        theirs[name].append(engine.writes(new, depth))
    engines = {name: median(rates) for name, rates in theirs.items()}
    plain_rate, own = (geometric_mean(each[name]["tokens_per_second"] for each in found) for name in ("ar", "default"))
    rounds, tokens = (sum(each["default"][name] for each in found) for name in ("rounds", "new_tokens"))
    return {
        "prompt_tokens": depth,
        "method": spec.method.name,
        "default": own,
        "mean_accepted_length": average([(tokens - len(found), rounds)]),
        "ar": plain_rate,
        **engines,
        "over_ar": own / plain_rate,
        "lowest_over_ar": min(each["default"]["tokens_per_second"] / each["ar"]["tokens_per_second"] for each in found),
        "ratio": own / max(engines.values()),
        "prompts": found,
        "different": sum(not each["same_tokens"] for each in found),
        "other_cores": busy,
    }


def _figures(runs: Sequence[longdraft.Result]) -> Cell:
    names = "new_tokens", "rounds", "mean_accepted_length"
    rate = median(run.tokens_per_second for run in runs)
    return {"tokens_per_second": rate, **{name: getattr(runs[0], name) for name in names}}


ROWS: dict[str, Callable[[Model, Any], Cell]] = {
    "plain": plain, "prompt": prompt, "verify": verify, "default": default,
}  # fmt: skip


def cells_of(model: Model, row: str) -> Cells:
    """The row and names of its cells, and what measures each."""
    if row == "default":
        for file in model.args.prompt_files:
            yield row, Path(file).stem, partial(ROWS[row], model, file)
        return
    args, limit = model.args, model.runner.context_length
    more = {"plain": args.steps, "prompt": 1, "verify": max(args.verify_rows)}[row]
    for length in {"plain": args.lengths, "prompt": args.prompt_lengths, "verify": args.verify_lengths}[row]:
        skipped = {"skipped": f"the model's context is {limit:,}"}
        yield row, str(length), partial(ROWS[row], model, length) if length + more <= limit else skipped.copy


def parsed(arguments: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH", dest="models", type=_model)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--ik-bench", type=Path, help="llama-bench of ik_llama.cpp")
    parser.add_argument("--openvino", type=Path, metavar="PYTHON", help="of an environment with openvino-genai")
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=[],
        help="JSONL files, folders of them, or a data set as bench takes it (TASK=PATH)",
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 16384], help="contexts of plain")
    parser.add_argument("--prompt-lengths", type=int, nargs="+", default=[512, 4096], help="tokens of prompt")
    parser.add_argument("--verify-lengths", type=int, nargs="+", default=[512, 4096], help="contexts of verify")
    parser.add_argument("--verify-rows", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--verify-turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=32, help="tokens that plain decodes")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens that default decodes")
    parser.add_argument("--data-rows", type=int, nargs="+", default=[4, 5, 6, 7], help="rows of each file of prompts")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[768, 10240], help="shortest and longest prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--arithmetic", choices=["int8", "float32"], help="left out: the file's default")
    parser.add_argument("--real-kv", action="store_true", help="fill KV stores by reading a text")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    args = parser.parse_args(arguments)
    folders = [sorted(map(str, Path(each).glob("*.jsonl"))) or [each] for each in args.prompts]
    args.prompt_files = [file for files in folders for file in files]
    named = {"llama": True, "ik": args.ik_bench, "openvino": args.openvino}
    args.engines = [name for name, given in named.items() if given]
    return args


def _model(words: str) -> tuple[str, Path]:
    name, _, path = words.partition("=")
    if not name or "/" in name or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{words}: give NAME=PATH, with the path of a GGUF file")
    return name, Path(path)


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    torch.set_num_threads(args.threads)
    about = {"hardware": machine.hardware(), "versions": machine.versions()}
    found: dict[str, Any] = {"engines": {}, "cells": {}}
    if args.json and args.json.exists() and not args.fresh:
        found |= json.loads(args.json.read_text())
    found |= about
    tables: dict[str, dict[tuple[str, str], Cell]] = {}
    for name, path in args.models:
        model = Model(path, args)
        settings = {"file": path.name, "bytes": path.stat().st_size} | {each: getattr(args, each) for each in SETTINGS}
        for row, cell, measure in (each for kind in args.rows for each in cells_of(model, kind)):
            key = f"{name}/{row}/{cell}"
            kept = found["cells"].get(key, {}).get("settings", {})
            if all(kept.get(each) == value for each, value in settings.items()):
                console.print(f"{key}: kept from an earlier run")
            else:
                console.print(f"{key} ...")
                found["cells"][key] = measure() | {"settings": settings}
                found["engines"] |= {name: engine.build for name, engine in model.engines.items() if engine.build}
                if args.json:  # whole or not at all, so that an interrupted run loses no finished cell
                    part = args.json.with_name(f".{args.json.name}.part")
                    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                    part.replace(args.json)
            tables.setdefault(row, {})[name, cell] = found["cells"][key]
    hardware, versions = found["hardware"], found["versions"]
    builds = "; ".join(f"{name} {' '.join(map(str, build.values()))}" for name, build in found["engines"].items())
    console.print(
        f"\n{hardware['cpu']}, {args.threads} threads of {hardware['cores']} cores; "
        f"longdraft {versions['longdraft']} ({args.arithmetic or 'default'} arithmetic), torch {versions['torch']}, "
        f"{builds}"
    )
    console.print(__doc__.partition("Rows of the table:\n\n")[2], highlight=False, markup=False)
    for row, own in tables.items():
        console.rule(row)
        console.print(table(own))


def table(cells: dict[tuple[str, str], Cell]) -> Table:
    """A row's cells, a line each: a list as its length, figures as they are."""
    names = dict.fromkeys(name for cell in cells.values() for name in cell if name not in ("settings", "turns"))
    made = Table("model", "", *names, box=None)
    for (model, name), cell in cells.items():
        made.add_row(model, name, *(_shown(cell.get(each, "")) for each in names))
    return made


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(each)}" for name, each in value.items())
    return f"{value:.2f}" if isinstance(value, float) else str(len(value) if isinstance(value, list) else value)


if __name__ == "__main__":
    main()
