"""``longdraft bench``: methods beside each other on a data file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from longdraft.bench import data, report
from longdraft.bench.run import Bench, Measured, Prompt, Settings, batches, prepare
from longdraft.cli import console, options
from longdraft.errors import CheckpointError
from longdraft.target.loading import load
from longdraft.verify.sampling import Sampling


def bench(
    data_files: Annotated[
        list[Path],
        typer.Option("--data", help="JSONL: rows with `text`, or with `context` and `input`; repeatable."),
    ],
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, with commas between; hf is transformers' generate. Options of one behind colons: "
            "specpv:budget=512:selector=quest."
        ),
    ] = "ar,prompt-lookup",
    draft: options.Draft = None,
    widths: options.Widths = None,
    nodes: options.Nodes = None,
    tree: options.Tree = None,
    depth: options.Depth = None,
    tree_top_k: options.TreeTopK = None,
    threshold: options.Threshold = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each file.", show_default="all")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens at most.")] = 64,
    context: Annotated[
        int | None, typer.Option(help="Cut the documents so that prompts have at most this many tokens.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed rounds; their median counts.")] = 3,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Decode on to --max-tokens, so that all do the same work.")
    ] = False,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold/--one-prefill",
            help="Let every method read the prompts itself, or ar for all of ours (long prompts).",
        ),
    ] = True,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are; no chat template.")] = False,
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    offload: options.Offload = None,
    rope_factor: options.RopeFactor = None,
    as_json: options.Json = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file too.")] = None,
    debug: options.Debug = False,
) -> None:
    """Measure methods on the same prompts, in turn, against ar (and against transformers with hf)."""
    names = tuple(name.strip() for name in methods.split(",") if name.strip())
    with options.settings_checked():
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        settings = Settings(
            names, max_tokens, context, batch, repeats, sampling, seed, raw, ignore_eos, cold,
            draft_options=options.draft_options(draft, widths, nodes, tree, depth, tree_top_k, threshold),
            offload=offload,
            own_options={name: options.method_options(*_parts(name)) for name in names if ":" in name},
        )  # fmt: skip
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise CheckpointError(f"--out {out}: its folder does not exist, or it is a folder itself.")
    samples = data.read(data_files, limit)
    with console.status() as status:
        loaded = load(model, dtype=dtype, device=device, rope_factor=rope_factor, progress=status)
        status(f"Encoding {len(samples)} samples")
        prompts = prepare(samples, loaded, settings)
        groups, left_over = batches(prompts, batch)
        with options.settings_checked():
            measuring = Bench(loaded, settings)
    if left_over:
        which = "1 sample is" if left_over == 1 else f"{left_over} samples are"
        console.note(f"{which} left out of batches of {batch}.")
    measured = _measure(measuring, groups)
    found = report.document(measuring, measured)
    _show(found, lambda ids: str(loaded.tokenizer.decode(ids)))
    if out is not None:
        _write(out, found)
    if as_json:
        console.line(json.dumps(found))


def _parts(contender: str) -> tuple[str, list[str]]:
    """``specpv:budget=512:margin=8`` -> the method's name and its options."""
    name, *pairs = contender.split(":")
    return name, pairs


def _measure(measuring: Bench, groups: list[tuple[Prompt, ...]]) -> list[Measured]:
    err = console.stderr()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} runs"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        # Drawn between the runs only: a thread that draws would take its share of what is measured.
        auto_refresh=False,
        disable=not err.is_terminal,
    )
    measured: list[Measured] = []
    with bar:
        task = bar.add_task("warming up", total=measuring.runs(len(groups)))
        bar.refresh()
        measuring.wake(groups[0][0])
        for number, group in enumerate(groups, 1):
            begun: list[str] = []

            def tick(name: str, number: int = number, begun: list[str] = begun) -> None:
                # Called before a run: the one that is shown as done is the one before.
                done = measuring.runs(number - 1) + len(begun)
                begun.append(name)
                bar.update(task, completed=done, description=f"sample {number}/{len(groups)}: {name}")
                bar.refresh()

            if not err.is_terminal:
                err.print(Text(f"Measuring {number} of {len(groups)}: {group[0].sample.origin} ..."))
            measured.append(measuring.measure(group, tick))
    return measured


def _show(found: dict[str, Any], decode: Any) -> None:
    out = console.stdout()
    for title, table in report.tables(found):
        out.print(Text(title, style="bold"))
        console.show(out, table)
        out.print()
    for line in report.listing(found, decode):
        out.print(Text(line, style="red" if line.startswith("MISMATCH") else ""))
    for line in report.DEFINITIONS:
        out.print(Text(line, style="dim"))


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error
