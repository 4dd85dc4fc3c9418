"""Measures longdraft and other engines on the same GGUF files, in turn, and prints tables.

    python benchmarks/real_models.py --model NAME=PATH.gguf [--model ...] --llama-bench PATH/llama-bench
        [--ik-bench PATH/llama-bench] [--openvino PATH/python]
        --prompts FOLDER_OR_JSONL... [--rows plain prompt verify default] [--lengths 512 4096 16384]
        [--repeats 3] [--json OUT] [--fresh]

Engines: llama.cpp; by option ik_llama.cpp and OpenVINO GenAI too (engines.py). ratio: longdraft over the best engine.

With --json, each finished cell is written to OUT at once. A later run with the same settings does not measure it again,
so an interrupted run continues; --fresh measures everything again. Rows of the table:

plain         tokens/s of plain decoding behind a context: longdraft by greedy forwards of one token, with a KV cache of
              random numbers (--real-kv: of a prefill); llama.cpp by llama-bench -p 0 -n STEPS -d CONTEXT -fa 1. Medians
              of the repeats.
prompt        tokens/s of the prefill of a prompt of random tokens; llama-bench -p TOKENS -n 0.
verify        seconds of a forward over a chain of some tokens, over those of a plain step of one token. Medians.
default       decode tokens/s (new tokens / decode seconds, prefill excluded) of the default method at T = 0 on prompts
              of real text, end of sequence ignored; against `ar`, our plain decoding, on the same prompts in the same
              process, and against the engines' plain decoding at the median length of the file's prompts, before and
              after them. A prompt's rate is the median of its repeats; a file's the geometric mean of its prompts.
              mean accepted length: new tokens / target verification forwards, bonus included, prefill's token not
              counted; `ar` is 1.0. different: prompts whose output was not that of `ar`.
other_cores   cores that other processes used while longdraft was measured.
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
from longdraft.trees.tree import chain_tree

Cell = dict[str, Any]
Cells = Iterator[tuple[str, str, Callable[[], Cell]]]

FILL_CHUNK, WARM_UP = 1024, 3  # KV entries that are filled at a time; tokens of a warm-up
# Settings that a cell depends on, besides its file.
SETTINGS = (
    "threads", "arithmetic", "repeats", "steps", "new_tokens", "real_kv", "verify_rows", "verify_turns", "data_rows",
    "prompt_tokens", "engines",
)  # fmt: skip
console = Console(width=None if sys.stdout.isatty() else 200)


class OtherProcesses:
    """Measures how many cores other processes use, from its creation on."""

    def __init__(self) -> None:
        self._start = self._usage()

    @property
    def cores(self) -> float:
        elapsed, busy, own = (now - before for now, before in zip(self._usage(), self._start, strict=True))
        return max(0.0, busy - own) / elapsed

    @staticmethod
    def _usage() -> tuple[float, float, float]:
        """Seconds: the clock, the work of all cores, and the work of this process."""
        times, own = psutil.cpu_times()._asdict(), os.times()
        # The user's seconds include those of guests.
        busy = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        return time.perf_counter(), float(busy), own.user + own.system


class Model:
    """A GGUF file and what measures it.

    Attributes:
        engines: other engines by name.
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

    def random_tokens(self, count: int) -> list[int]:
        """Random token ids, the same ones in every call."""
        generator = torch.Generator().manual_seed(count)
        return torch.randint(self.runner.vocab_size, (count,), generator=generator).tolist()

    def prompts(self, file: str) -> list[list[int]]:
        """Prompts of a file whose length is between those of --prompt-tokens and fits the context."""
        shortest, longest = self.args.prompt_tokens
        longest, samples = min(longest, self.runner.context_length - self.args.new_tokens), load_samples([file])
        chosen = [samples[i] for i in self.args.data_rows if i < len(samples)]
        prompts = [list(sample.encode(self.loaded.tokenizer)) for sample in chosen]
        return [prompt for prompt in prompts if shortest <= len(prompt) <= longest]

    def filled_store(self, length: int) -> KVStore:
        """A KV store of random tokens: with random keys and values, or with --real-kv those of a prefill."""
        store = self.runner.new_store(1, length + self.args.steps + max(self.args.verify_rows))
        tokens, shape = self.random_tokens(length), store.shape
        for start in range(0, length, FILL_CHUNK):
            chunk = tokens[start : start + FILL_CHUNK]
            if self.args.real_kv:
                self.runner.forward(store.make_forward_batch([0], [chunk], is_prefill=True), store, logits="none")
            else:
                kv = torch.randn(2, shape.layers, shape.kv_heads, len(chunk), shape.head_dim).to(shape.dtype)
                store.write_entries(0, start, *kv)
            store.commit(0, range(len(chunk)))
        return store


def compare_rates(model: Model, measure_engine: Callable[[Engine], float], measure: Callable[[], float]) -> Cell:
    """Tokens a second of the engines and of longdraft ("ours"), in turn: medians, and ours over the best."""
    rates: dict[str, list[float]] = {"ours": [], **{name: [] for name in model.engines}}
    other_cores = []
    for i in range(model.args.repeats):
        console.print(f"  repeat {i + 1} of {model.args.repeats}: {', '.join(model.engines)}, then ours")
        for name, engine in model.engines.items():
            rates[name].append(measure_engine(engine))
        others = OtherProcesses()
        rates["ours"].append(measure())
        other_cores.append(others.cores)
    medians = {name: median(values) for name, values in rates.items()}
    best = max(rate for name, rate in medians.items() if name != "ours")
    return {**medians, "ratio": medians["ours"] / best, "turns": rates, "other_cores": max(other_cores)}


def plain(model: Model, length: int) -> Cell:
    steps, store = model.args.steps, model.filled_store(length)
    decode_seconds(model, store, WARM_UP)
    return compare_rates(
        model, lambda engine: engine.decode_rate(steps, length), lambda: steps / decode_seconds(model, store, steps)
    )


def decode_seconds(model: Model, store: KVStore, steps: int) -> float:
    """Seconds of greedy decoding behind the tokens of a store, which does not change."""
    length, token = store.lengths[0], 1
    start = time.perf_counter()
    for _ in range(steps):
        logits = verify_trees(model.runner, store, [0], [chain_tree(token, ())]).logits
        assert logits is not None
        token = int(logits[0, 0].argmax())
        store.commit(0, [0])
    seconds = time.perf_counter() - start
    store.truncate(0, length)
    return seconds


def prompt(model: Model, length: int) -> Cell:
    spec = Speculator("ar", model.loaded.model, model.loaded.tokenizer)

    def measure() -> float:
        (result,) = spec.generate([model.random_tokens(length)], max_new_tokens=1, eos_token_ids=[])
        return length / result.prefill_seconds

    spec.generate([model.random_tokens(64)], max_new_tokens=2, eos_token_ids=[])
    return compare_rates(model, lambda engine: engine.prefill_rate(length), measure)


def verify(model: Model, length: int) -> Cell:
    store, others = model.filled_store(length), OtherProcesses()
    seconds: dict[int, list[float]] = {size: [] for size in (1, *model.args.verify_rows)}
    for i in range(-1, model.args.verify_turns):
        for size, values in seconds.items():
            start = time.perf_counter()
            verify_trees(model.runner, store, [0], [chain_tree(1, range(1, size))])
            if i >= 0:  # the first repeat warms up
                values.append(time.perf_counter() - start)
    step = median(seconds[1])
    over = {str(size): median(values) / step for size, values in seconds.items() if size > 1}
    return {"step_seconds": step, "over_step": over, "other_cores": others.cores}


def default(model: Model, file: str) -> Cell:
    if not (prompts := model.prompts(file)):
        return {"skipped": "no prompt of these lengths"}
    _, spec = specs = [Speculator(name, model.loaded.model, model.loaded.tokenizer) for name in ("ar", None)]
    spec.planner()
    for each_spec in specs:  # a warm-up
        each_spec.generate([model.random_tokens(64)], max_new_tokens=8, eos_token_ids=[])
    new, depth = model.args.new_tokens, int(median(map(len, prompts)))
    engine_rates = {name: [engine.decode_rate(new, depth)] for name, engine in model.engines.items()}
    others, results = OtherProcesses(), list[dict[str, Any]]()
    for i, prompt_ids in enumerate(prompts, 1):
        console.print(f"  prompt {i} of {len(prompts)}: {len(prompt_ids):,} tokens")
        cache = PromptCache()
        runs: dict[str, list[longdraft.Result]] = {"ar": [], "default": []}
        for _ in range(model.args.repeats):
            for spec_runs, each_spec in zip(runs.values(), specs, strict=True):
                spec_runs += each_spec.generate([prompt_ids], max_new_tokens=new, eos_token_ids=[], cache=cache)
        outputs = {tuple(run.token_ids) for spec_runs in runs.values() for run in spec_runs}
        figures = {name: _figures(spec_runs) for name, spec_runs in runs.items()}
        results.append({**figures, "prompt_tokens": len(prompt_ids), "same_tokens": len(outputs) == 1})
    other_cores = others.cores
    for name, engine in model.engines.items():
        engine_rates[name].append(engine.decode_rate(new, depth))
    engines = {name: median(rates) for name, rates in engine_rates.items()}
    rates = {name: [result[name]["tokens_per_second"] for result in results] for name in ("ar", "default")}
    ar_rate, rate = geometric_mean(rates["ar"]), geometric_mean(rates["default"])
    rounds, tokens = (sum(result["default"][name] for result in results) for name in ("rounds", "new_tokens"))
    return {
        "prompt_tokens": depth,
        "method": spec.method.name,
        "default": rate,
        "mean_accepted_length": average([(tokens - len(results), rounds)]),
        "ar": ar_rate,
        **engines,
        "over_ar": rate / ar_rate,
        "lowest_over_ar": min(x / ar for x, ar in zip(rates["default"], rates["ar"], strict=True)),
        "ratio": rate / max(engines.values()),
        "prompts": results,
        "different": sum(not result["same_tokens"] for result in results),
        "other_cores": other_cores,
    }


def _figures(runs: Sequence[longdraft.Result]) -> Cell:
    names = "new_tokens", "rounds", "mean_accepted_length"
    rate = median(run.tokens_per_second for run in runs)
    return {"tokens_per_second": rate, **{name: getattr(runs[0], name) for name in names}}


ROWS: dict[str, Callable[[Model, Any], Cell]] = {
    "plain": plain, "prompt": prompt, "verify": verify, "default": default,
}  # fmt: skip


def cells_of(model: Model, row: str) -> Cells:
    """(row, name of a cell, function that measures it)."""
    if row == "default":
        for file in model.args.prompt_files:
            yield row, Path(file).stem, partial(ROWS[row], model, file)
        return
    args, limit = model.args, model.runner.context_length
    new_tokens = {"plain": args.steps, "prompt": 1, "verify": max(args.verify_rows)}[row]
    for length in {"plain": args.lengths, "prompt": args.prompt_lengths, "verify": args.verify_lengths}[row]:
        skipped = {"skipped": f"the model's context is {limit:,}"}
        yield row, str(length), partial(ROWS[row], model, length) if length + new_tokens <= limit else skipped.copy


def parse_args(arguments: list[str] | None) -> Any:
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
    files_of = [sorted(map(str, Path(path).glob("*.jsonl"))) or [path] for path in args.prompts]
    args.prompt_files = [file for files in files_of for file in files]
    options = {"llama": True, "ik": args.ik_bench, "openvino": args.openvino}
    args.engines = [name for name, value in options.items() if value]
    return args


def _model(argument: str) -> tuple[str, Path]:
    name, _, path = argument.partition("=")
    if not name or "/" in name or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{argument}: give NAME=PATH, with the path of a GGUF file")
    return name, Path(path)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    torch.set_num_threads(args.threads)
    about = {"hardware": machine.hardware(), "versions": machine.versions()}
    found: dict[str, Any] = {"engines": {}, "cells": {}}
    if args.json and args.json.exists() and not args.fresh:
        found |= json.loads(args.json.read_text())
    found |= about
    tables: dict[str, dict[tuple[str, str], Cell]] = {}
    for name, path in args.models:
        model = Model(path, args)
        settings = {"file": path.name, "bytes": path.stat().st_size, **{key: getattr(args, key) for key in SETTINGS}}
        for row, cell, measure in (item for kind in args.rows for item in cells_of(model, kind)):
            key = f"{name}/{row}/{cell}"
            earlier = found["cells"].get(key, {}).get("settings", {})
            if all(earlier.get(setting) == value for setting, value in settings.items()):
                console.print(f"{key}: kept from an earlier run")
            else:
                console.print(f"{key} ...")
                found["cells"][key] = measure() | {"settings": settings}
                found["engines"] |= {name: engine.build for name, engine in model.engines.items() if engine.build}
                if args.json:  # the file is replaced at once, so that an interrupted run loses no finished cell
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
    for row, row_cells in tables.items():
        console.rule(row)
        console.print(table(row_cells))


def table(cells: dict[tuple[str, str], Cell]) -> Table:
    """A table with a line for each cell of a row. Of lists it shows the length."""
    keys = dict.fromkeys(key for cell in cells.values() for key in cell if key not in ("settings", "turns"))
    rich_table = Table("model", "", *keys, box=None)
    for (model, name), cell in cells.items():
        rich_table.add_row(model, name, *(_format(cell.get(key, "")) for key in keys))
    return rich_table


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_format(x)}" for key, x in value.items())
    return f"{value:.2f}" if isinstance(value, float) else str(len(value) if isinstance(value, list) else value)


if __name__ == "__main__":
    main()
