"""``longdraft bench length``: accepted length, tokens/s and break-even against the length of the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text as Line

from longdraft.bench import charts, tasks
from longdraft.bench.data import Short
from longdraft.bench.servers import Server
from longdraft.cli import acceptance, bench_options, console, method_options, options
from longdraft.cli.cancel import EXIT_CODE
from longdraft.cli.progress import Runs

if TYPE_CHECKING:
    from longdraft.bench.acceptance import Acceptance

FIRST, FARTHEST = 1024, 131072


def bench_length(
    *,
    data: bench_options.Data = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens that prompts are cut to; YaRN stretches the model for those beyond its context.",
            show_default="1024, 2048, ... as far as the model goes",
        ),
    ] = None,
    short: bench_options.ShortTexts = Short.join,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, with commas between; options of one behind colons. ar comes by itself.",
            show_default="every draft that comes along for the model, else self",
        ),
    ] = None,
    drafting: method_options.DraftOptions,
    plan: bench_options.Plan = "fixed",
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure servers instead: NAME=http://host:port of an OpenAI-compatible one; repeatable. Break-even "
            "needs one that decodes plainly, by the name ar.",
            show_default="none",
        ),
    ] = None,
    api_key: Annotated[str, typer.Option("--api-key", help="For servers that ask for one.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Rows of each file.")] = 2,
    max_tokens: bench_options.MaxTokens = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the fastest counts.")] = 2,
    seed: bench_options.Seed = 0,
    ignore_eos: bench_options.IgnoreEos = False,
    raw: bench_options.Raw = False,
    wording: options.TemplateOptions,
    loading: options.ModelOptions,
    results: bench_options.Results = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the figure.")] = None,
    output: options.Output,
    composed: options.Load = None,
) -> None:
    """Measure what must be accepted at each length for speculation to pay, and what is: for methods here and servers.

    Greedy. Ctrl-C ends it with the figures so far.
    """

    from longdraft.bench import length
    from longdraft.bench.acceptance import by_default
    from longdraft.bench.settings import REFERENCE

    bench_options.check_writable({"--svg": svg, "--results": results})
    if svg is not None:
        charts.available()
    asked_for = None if lengths is None else method_options.whole_numbers("--lengths", lengths)
    samples = tasks.read(data or [tasks.BUILT_IN], limit)
    if url:
        if results is not None or methods is not None or wording.asked:
            given = "--methods, --results, --system and --no-think"
            raise options.SettingError(f"{given} are for methods here: leave them out with --url.")
        found, complete = _servers(url, api_key, samples, asked_for, max_tokens, repeats, ignore_eos)
    else:
        settings = acceptance.settings_of(
            methods, drafting, lambda target: by_default(target) or ("self",), (REFERENCE,),
            max_tokens=max_tokens, contexts=asked_for or (None,), seed=seed, raw=raw, ignore_eos=ignore_eos, plan=plan,
            asked=wording.asked,
        )  # fmt: skip
        with console.status() as status:
            measuring = acceptance.measuring_of(loading, settings, (0.0,), status, repeats)
        cut_to = asked_for or length.doubled(FIRST, min(measuring.context, FARTHEST))
        found, complete = _here(measuring, samples, cut_to, short, results)
    if found["rows"]:
        console.report(length.tables(found), map(Line, found["notes"]), length.DEFINITIONS)
        if svg is not None:
            bench_options.draw(length.chart(found), svg)
    output.json(found)
    if not complete:
        console.note("Stopped before the end." + ("" if results else " Nothing is kept."))
        raise typer.Exit(EXIT_CODE)


def _here(
    measuring: Acceptance, samples: Sequence[Any], cut_to: Sequence[int], short: Short, results: Path | None
) -> tuple[dict[str, Any], bool]:
    """The report of methods of this package; and True if no run is missing."""
    from longdraft.bench import length

    with console.status() as status:
        status(f"Cutting {len(samples)} texts to {len(set(cut_to))} lengths")
        work, notes = measuring.work(samples, cut_to, short)
    done, _, complete = acceptance.measure(measuring, work, results, notes, timed=True)
    floors = []
    if complete:
        with console.status() as status:
            status("Timing verifications behind made-up texts")
            floors = length.floors(measuring.target, cut_to)
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
    from longdraft.bench import length, server_length

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
