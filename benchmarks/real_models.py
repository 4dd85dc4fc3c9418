"""Measures longdraft and llama.cpp on the same GGUF files, in turns, and prints where we stand.

    python benchmarks/real_models.py --model NAME=PATH.gguf [--model ...] --llama-bench PATH/llama-bench
        --prompts FOLDER_OR_JSONL... [--rows plain prompt verify default transformers] [--lengths 512 4096 16384]
        [--repeats 3] [--transformers] [--json OUT] [--fresh]

With --json, a cell that is finished is in OUT at once, and is not measured again by a later run with the same settings
unless --fresh is given: a run that was interrupted goes on where it was. Rows of the table:
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from real_models_rows import ROWS, Cell, Model
from rich.console import Console
from rich.table import Table

from longdraft.bench import machine
from longdraft.planning.load import SLACK

DEFINITIONS = """\
plain         tokens/s of decoding one token after the other at a context of so many tokens: ours a greedy forward of
              one row a token, behind a KV store that is filled with random numbers (--real-kv: by reading a text);
              llama.cpp by llama-bench -p 0 -n STEPS -d CONTEXT -fa 1. Medians of turns.
prompt        tokens/s of reading a prompt of random tokens, to its first new token; llama-bench -p TOKENS -n 0.
verify        seconds of a forward over a chain of so many rows, over those of a plain step of one row. Medians.
default       decode tokens/s (new tokens / decode seconds, prefill excluded) of the default method at T = 0 on prompts
              of real text, end of sequence ignored; against `ar`, our plain decoding, on the same prompts in the same
              process, and against llama-bench's plain decoding at the median length of the file's prompts, before and
              after them. A prompt's rate is the median of its repeats; a file's the geometric mean of its prompts.
              mean accepted length: new tokens / target verification forwards, bonus included, prefill's token not
              counted; `ar` is 1.0. different: prompts whose text was not that of `ar`.
transformers  decode tokens/s of transformers' generate with the weights in float32, on the prompts of `default`.
              Only with --transformers.
busy: other processes took so many cores while ours was measured."""

console = Console(width=None if sys.stdout.isatty() else 160)  # tables in a file are as wide as they are


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    torch.set_num_threads(args.threads)
    found = {} if args.fresh or args.json is None or not args.json.exists() else json.loads(args.json.read_text())
    cells: dict[str, Cell] = found.get("cells", {})
    about = {"hardware": machine.hardware() | {"instruction_sets": instruction_sets()}, "versions": machine.versions()}
    build: dict[str, Any] = found.get("llama_cpp", {})
    wanted: list[str] = []
    for name, path in args.models:
        model, settings = Model(name, path, args, console.print), settings_of(path, args)
        for row in args.rows:
            for cell, measure in ROWS[row](model):
                key = f"{name}/{row}/{cell}"
                wanted.append(key)
                if cells.get(key, {}).get("settings") == settings:
                    console.print(f"{key}: kept from an earlier run")
                    continue
                console.print(f"{key} ...")
                cells[key] = measure() | {"settings": settings}
                build = model.build or build
                if args.json:
                    _write(args.json, about | {"llama_cpp": build, "cells": cells})
    shown = {key: cells[key] for key in wanted}
    report(shown, about, build, args)


def parsed(arguments: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{DEFINITIONS}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH", dest="models", type=_model)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="JSONL files, or folders of them")
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
    parser.add_argument("--transformers", action="store_true", help="measure transformers too: 4 bytes a weight")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    args = parser.parse_args(arguments)
    folders = [sorted(each.glob("*.jsonl")) if each.is_dir() else [each] for each in args.prompts]
    args.prompt_files = [file for files in folders for file in files]
    if "default" in args.rows and not args.prompt_files:
        if args.rows != list(ROWS):
            parser.error("the row `default` needs --prompts")
        console.print("Without --prompts the row `default` is left out.")
    return args


def _model(words: str) -> tuple[str, Path]:
    name, _, path = words.partition("=")
    if not name or "/" in name or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{words}: give NAME=PATH, with the path of a GGUF file")
    return name, Path(path)


def settings_of(path: Path, args: Any) -> dict[str, Any]:
    """The settings that a cell depends on, besides its name."""
    names = ("threads", "arithmetic", "repeats", "steps", "new_tokens", "real_kv", "verify_rows", "verify_turns")
    more = ("data_rows", "prompt_tokens")
    return {"file": path.name, "bytes": path.stat().st_size} | {name: getattr(args, name) for name in (*names, *more)}


def instruction_sets() -> list[str]:
    """Vector instructions that the processor says it has; empty where the system does not tell."""
    wanted = ("sse4", "avx", "amx", "fma", "f16c", "asimd", "sve", "sme", "i8mm", "bf16")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return sorted(flag for flag in flags if flag.startswith(wanted))


def _write(file: Path, found: dict[str, Any]) -> None:
    """Writes the whole object or nothing, so that an interrupted run loses no finished cell."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def report(cells: dict[str, Cell], about: dict[str, Any], build: dict[str, Any], args: Any) -> None:
    """Prints the machine, the definitions and a table a row."""
    hardware = about["hardware"]
    sets = ", ".join(hardware["instruction_sets"]) or "unknown"
    console.print()
    console.print(f"{hardware['cpu']}, {args.threads} threads of {hardware['cores']} cores; instruction sets: {sets}")
    console.print(
        f"longdraft {about['versions']['longdraft']} ({args.arithmetic or 'default'} arithmetic), "
        f"torch {about['versions']['torch']}, llama.cpp {build.get('build_number')} ({build.get('build_commit')})"
    )
    console.print(DEFINITIONS, highlight=False, markup=False)
    for row in ROWS:
        own = {tuple(key.split("/", 2)[::2]): cell for key, cell in cells.items() if key.split("/")[1] == row}
        if own:
            console.rule(row)
            console.print(TABLES[row](own, args))


def table(own: dict[Any, Cell], columns: dict[str, Any]) -> Table:
    """A table with a line a cell.

    Args:
        columns: heading -> what stands there for a cell.
    """
    made = Table("model", "", *columns, box=None)
    for column in made.columns[1:]:
        column.justify = "right"
    for (model, name), cell in own.items():
        if "skipped" in cell:
            made.add_row(model, name, cell["skipped"])
        else:
            made.add_row(model, name, *(str(value(cell)) for value in columns.values()))
    return made


def rates(own: dict[Any, Cell], args: Any) -> Table:
    columns = {
        "ours, tokens/s": lambda cell: f"{cell['ours']:.2f}",
        "llama.cpp, tokens/s": lambda cell: f"{cell['llama']:.2f}",
        "ours / llama.cpp": lambda cell: f"{cell['ratio']:.2f}",
        "busy": busy,
    }
    return table(own, columns)


def verifications(own: dict[Any, Cell], args: Any) -> Table:
    columns: dict[str, Any] = {"plain step, ms": lambda cell: f"{1e3 * cell['step_seconds']:.1f}"}
    for rows in map(str, args.verify_rows):
        columns[f"{rows} rows"] = lambda cell, rows=rows: f"{cell['over_step'][rows]:.2f}"
    return table(own, columns | {"busy": busy})


def texts(own: dict[Any, Cell], args: Any) -> Table:
    columns = {
        "tokens": lambda cell: f"{cell['prompt_tokens']:,}",
        "method": lambda cell: cell["method"],
        "tokens/s": lambda cell: f"{cell['default']:.2f}",
        "accepted": lambda cell: f"{cell['mean_accepted_length']:.2f}",
        "ar": lambda cell: f"{cell['ar']:.2f}",
        "llama.cpp": lambda cell: f"{cell['llama']:.2f}",
        "/ ar": lambda cell: f"{cell['over_ar']:.2f}",
        "/ llama.cpp": lambda cell: f"{cell['over_llama']:.2f}",
        "prompts": lambda cell: len(cell["prompts"]),
        "different": lambda cell: cell["different"],
        "busy": busy,
    }
    return table(own, columns)


def peers(own: dict[Any, Cell], args: Any) -> Table:
    columns = {
        "tokens": lambda cell: f"{cell['prompt_tokens']:,}",
        "tokens/s": lambda cell: f"{cell['tokens_per_second']:.2f}",
        "prompts": lambda cell: len(cell["prompts"]),
    }
    return table(own, columns)


def busy(cell: Cell) -> str:
    return f"{cell['other_cores']:.1f}" if cell["other_cores"] > SLACK else ""


TABLES = {"plain": rates, "prompt": rates, "verify": verifications, "default": texts, "transformers": peers}


if __name__ == "__main__":
    main()
