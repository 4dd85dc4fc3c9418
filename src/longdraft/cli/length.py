"""``longdraft bench length``: accepted length, tokens/s and break-even against the length of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text as Line

from longdraft.bench import charts, length, server_length, tasks
from longdraft.bench.acceptance import Acceptance, Accepted, Results, Short, by_default
from longdraft.bench.peers import PEERS
from longdraft.bench.servers import Server
from longdraft.bench.settings import REFERENCE, Settings
from longdraft.cli import acceptance, bench_options, console, method_options, options
from longdraft.cli.cancel import EXIT_CODE
from longdraft.cli.progress import Runs
from longdraft.errors import CheckpointError
from longdraft.methods import method_of
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.embedded import EMBEDDED_ID
from longdraft.model.runner import TargetRunner

FIRST, FARTHEST = 1024, 131072


def bench_length(
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="JSONL, or a data set by name, as for bench; repeatable.",
            show_default="long modules of Python's standard library",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens that prompts are cut to; YaRN stretches the model for those beyond its context.",
            show_default="1024, 2048, ... as far as the model goes",
        ),
    ] = None,
    short: Annotated[
        Short,
        typer.Option(help="Texts shorter than a length: leave them out, join the next rows' texts, or keep them."),
    ] = Short.join,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, with commas between; options of one behind colons. ar comes by itself.",
            show_default="every draft that comes along for the model, else self",
        ),
    ] = None,
    drafting: method_options.DraftOptions,
    plan: Annotated[
        str, typer.Option("--plan", help="fixed: a method's own trees; auto: trees that pay, or none.")
    ] = "fixed",
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure servers instead: NAME=http://host:port of an OpenAI-compatible one; repeatable. Break-even "
            f"needs one that decodes plainly, by the name {REFERENCE}.",
            show_default="none",
        ),
    ] = None,
    api_key: Annotated[str, typer.Option("--api-key", help="For servers that ask for one.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Rows of each file.")] = 2,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="New tokens at most.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the fastest counts.")] = 2,
    seed: bench_options.Seed = 0,
    ignore_eos: bench_options.IgnoreEos = False,
    raw: bench_options.Raw = False,
    loading: options.ModelOptions,
    results: Annotated[
        Path | None,
        typer.Option(help="Append each run to this file (JSONL); what is there already is not measured again."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the figure.")] = None,
    output: options.Output,
    composed: options.Load = None,
) -> None:
    """Measure what must be accepted at each length for speculation to pay, and what is: for methods here and servers.

    Greedy. Ctrl-C ends it with the figures so far.
    """
    bench_options.check_writable({"--svg": svg, "--results": results})
    if svg is not None:
        charts.available()
    if plan not in ("fixed", "auto"):
        raise options.SettingError(f"--plan must be auto or fixed, got {plan!r}")
    asked_for = None if lengths is None else method_options.whole_numbers("--lengths", lengths)
    samples = tasks.read(data or [tasks.BUILT_IN], limit)
    if url:
        if results is not None:
            raise options.SettingError("--results is for methods here: leave it out with --url.")
        found, complete = _servers(url, api_key, samples, asked_for, max_tokens, repeats, ignore_eos)
    else:
        names = None if methods is None else method_options.words(methods)
        if names is None and drafting.draft is not None:
            names = [method_of(drafting.draft).name]

        def settings(names: Sequence[str]) -> Settings:
            if any(name in PEERS for name in names):
                raise options.SettingError("--methods takes methods of longdraft: see `longdraft methods`.")
            with options.settings_checked():
                return Settings(
                    tuple(dict.fromkeys((REFERENCE, *names))), max_tokens, seed=seed, raw=raw, ignore_eos=ignore_eos,
                    plan=plan, draft_options=drafting.options(),
                    own_options=method_options.contender_options(names),
                )  # fmt: skip

        chosen = None if names is None else settings(names)
        with console.status() as status:

            def load(factor: float | None) -> LoadedModel:
                again = factor != loading.rope_factor
                return replace(loading, rope_factor=factor).load((lambda message: None) if again else status)

            with options.settings_checked():
                measuring = Acceptance(
                    load, lambda target: chosen or settings(_default(target)), (0.0,), loading.model or EMBEDDED_ID,
                    loading.rope_factor, status, repeats,
                )  # fmt: skip
        cut_to = asked_for or length.doubled(FIRST, min(measuring.context, FARTHEST))
        found, complete = _here(measuring, samples, cut_to, short, results)
    if found["rows"]:
        console.report(length.tables(found), map(Line, found["notes"]), length.DEFINITIONS)
        if svg is not None:
            _draw(found, svg)
    output.json(found)
    if not complete:
        console.note("Stopped before the end." + ("" if results else " Nothing is kept."))
        raise typer.Exit(EXIT_CODE)


def _default(target: TargetRunner) -> tuple[str, ...]:
    return by_default(target) or ("self",)


def _here(
    measuring: Acceptance, samples: Sequence[Any], cut_to: Sequence[int], short: Short, results: Path | None
) -> tuple[dict[str, Any], bool]:
    """The report of methods of this package; and True if no run is missing."""
    work, notes = measuring.work(samples, cut_to, short)
    asked = [each for factor, rows in work.items() for own in rows.values() for each in measuring.asked(own, factor)]
    file = None if results is None else Results(results, measuring)
    # A file of an earlier version, or of `bench acceptance`, may lack times.
    runs: dict[Any, Accepted] = {} if file is None else {r.asked: r for r in file.measured if r.seconds is not None}
    if there := sum(each in runs for each in asked):
        console.note(f"{there} runs are in {results} already; {len(asked) - there} are left.")
    complete = acceptance.measure(measuring, work, runs, file, notes)
    floors = []
    if complete:
        with console.status() as status:
            status("Timing verifications behind made-up texts")
            floors = length.floors(measuring.target, cut_to)
    done = [runs[each] for each in asked if each in runs]
    return length.document(done, measuring.settings.methods, floors, notes, complete), complete


def _servers(
    urls: Sequence[str],
    key: str,
    samples: Sequence[Any],
    cut_to: Sequence[int] | None,
    max_tokens: int,
    repeats: int,
    ignore_eos: bool,
) -> tuple[dict[str, Any], bool]:
    """The report of servers; and True if no answer is missing."""
    pairs = [(name, address) if eq else (name, name) for name, eq, address in (each.partition("=") for each in urls)]
    servers = {name: Server(address, key) for name, address in pairs}
    asked = cut_to or length.doubled(FIRST, 4 * FIRST)
    measuring = server_length.Servers(servers, samples, asked, max_tokens, repeats, ignore_eos)
    complete = True
    with Runs(measuring.ticks) as runs:
        try:
            for what in measuring.measure():
                runs.told(what)("server")
        except KeyboardInterrupt:
            complete = False
    return measuring.document(complete), complete


def _draw(found: dict[str, Any], svg: Path) -> None:
    try:
        svg.write_bytes(charts.image(length.chart(found), "svg"))
    except OSError as error:
        raise CheckpointError(f"{svg} cannot be written: {error.strerror}.") from error
    console.note(f"The figure is in {svg}.")
