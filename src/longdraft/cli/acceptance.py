"""``longdraft bench acceptance``: mean accepted length of every draft against context length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text as Line

import longdraft
from longdraft.bench import acceptance_report, charts, tasks
from longdraft.bench.data import Short
from longdraft.cli import bench_options, console, method_options, options
from longdraft.cli.cancel import EXIT_CODE
from longdraft.cli.progress import Runs
from longdraft.errors import CapabilityError
from longdraft.model.embedded import EMBEDDED_ID

if TYPE_CHECKING:
    from longdraft.bench.acceptance import Acceptance, Accepted, Asked, Results, Work
    from longdraft.bench.settings import Settings
    from longdraft.model.checkpoints import Progress
    from longdraft.model.runner import TargetRunner

LENGTHS = "512,1024,2048,4096,8192,16384,32768"


def acceptance(
    *,
    data: bench_options.Data = None,
    lengths: Annotated[
        str, typer.Option(help="Tokens that prompts are cut to; YaRN stretches the model for those beyond its context.")
    ] = LENGTHS,
    short: bench_options.ShortTexts = Short.leave,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, with commas between; options of one behind colons: longspec:nodes=20.",
            show_default="every draft that comes along for the model",
        ),
    ] = None,
    drafting: method_options.DraftOptions,
    temperature: Annotated[
        str, typer.Option("--temperature", "-t", help="One or several, with commas between; 0 is greedy.")
    ] = "0,1",
    foresee: options.Foresee = True,
    limit: bench_options.Limit = None,
    max_tokens: bench_options.MaxTokens = 64,
    seed: bench_options.Seed = 0,
    ignore_eos: bench_options.IgnoreEos = False,
    raw: bench_options.Raw = False,
    wording: options.TemplateOptions,
    levels: Annotated[int, typer.Option(min=0, help="Show too how often so many drafted tokens were accepted.")] = 0,
    loading: options.ModelOptions,
    results: bench_options.Results = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the figure; of several temperatures, one each: NAME-t0.svg, NAME-t1.svg.")
    ] = None,
    output: options.Output,
    composed: options.Load = None,
) -> None:
    """Measure mean accepted length against context length: every draft, greedy and sampled, with the papers' trees.

    Ctrl-C ends it with the figures so far.
    """
    cut_to = method_options.whole_numbers("--lengths", lengths)
    temperatures = tuple(dict.fromkeys(method_options.numbers("--temperature", temperature)))
    if not temperatures or not cut_to:
        raise options.SettingError("--lengths and --temperature must name one value at least.")
    for t in temperatures:
        longdraft.Sampling(temperature=t)
    settings = settings_of(
        methods, drafting, _default,
        max_tokens=max_tokens, contexts=cut_to, seed=seed, raw=raw, ignore_eos=ignore_eos, plan="fixed",
        asked=wording.asked, sampling=longdraft.Sampling(foresee=foresee),
    )  # fmt: skip
    bench_options.check_writable({"--svg": svg, "--results": results})
    if svg is not None:
        charts.available()
    samples = tasks.read(data or [tasks.BUILT_IN], limit)
    with console.status() as status:
        measuring = measuring_of(loading, settings, temperatures, status)
        status(f"Cutting {len(samples)} texts to {len(set(cut_to))} lengths")
        work, notes = measuring.work(samples, cut_to, short)
    for note in notes:
        console.note(note)
    done, asked, complete = measure(measuring, work, results, notes)
    found = acceptance_report.document(done, measuring.settings.methods, notes, complete)
    _show(found, levels, svg)
    output.json(found)
    if not complete:
        console.note(f"Stopped after {len(done)} of {asked} runs." + ("" if results else " Nothing is kept."))
        raise typer.Exit(EXIT_CODE)


def _default(target: TargetRunner) -> tuple[str, ...]:
    from longdraft.bench.acceptance import by_default

    found = by_default(target)
    if not found:
        raise CapabilityError("No draft for this model comes with longdraft: name one with --draft, or --methods.")
    return found


def settings_of(
    methods: str | None,
    drafting: method_options.DraftOptions,
    by_default: Callable[[TargetRunner], Sequence[str]],
    always: Sequence[str] = (),
    **more: Any,
) -> Callable[[TargetRunner], Settings]:
    """Settings for a target. Those of methods that are named are checked at once, before a model is read.

    Args:
        methods: with commas between; None: the given draft's, else those by default.
        always: methods that come first, named or not. more: further arguments of ``Settings``.

    Raises:
        SettingError: no method of ours, or an option that none of them has.
    """
    from longdraft.bench.peers import PEERS
    from longdraft.bench.settings import Settings
    from longdraft.methods import method_of

    names = None if methods is None else method_options.words(methods)
    if names is None and drafting.draft is not None:
        names = [method_of(drafting.draft).name]

    def made(names: Sequence[str]) -> Settings:
        if not names or any(name in PEERS for name in names):
            raise options.SettingError("--methods takes methods of longdraft, one at least: see `longdraft methods`.")
        with options.settings_checked():
            return Settings(
                tuple(dict.fromkeys((*always, *names))), draft_options=drafting.options(),
                own_options=method_options.contender_options(names), **more,
            )  # fmt: skip

    chosen = None if names is None else made(names)
    return lambda target: chosen or made(by_default(target))


def measuring_of(
    loading: options.ModelOptions,
    settings: Callable[[TargetRunner], Settings],
    temperatures: tuple[float, ...],
    status: Progress,
    repeats: int = 1,
) -> Acceptance:
    """A measurement whose model is loaded anew for each YaRN factor; only the first time it says how far it is."""
    from longdraft.bench.acceptance import Acceptance

    def load(factor: float | None) -> longdraft.LoadedModel:
        again = factor != loading.rope_factor  # then the runs' progress is on the screen
        return replace(loading, rope_factor=factor).load((lambda message: None) if again else status)

    with options.settings_checked():
        return Acceptance(
            load, settings, temperatures, loading.model or EMBEDDED_ID, loading.rope_factor, status, repeats
        )


def measure(
    measuring: Acceptance, work: Work, results: Path | None, notes: list[str], timed: bool = False
) -> tuple[list[Accepted], int, bool]:
    """The runs of a file, and those that are missing in it; how many there should be; and False if Ctrl-C ended it.

    Args:
        notes: gets remarks on lengths that are left out.
        timed: runs without seconds, as files of earlier versions have them, are made again.
    """
    from longdraft.bench.acceptance import Results

    asked = [each for factor, rows in work.items() for own in rows.values() for each in measuring.asked(own, factor)]
    file = None if results is None else Results(results, measuring)
    runs = {} if file is None else {r.asked: r for r in file.measured if r.seconds is not None or not timed}
    if there := sum(each in runs for each in asked):
        console.note(f"{there} runs are in {results} already; {len(asked) - there} are left.")
    complete = _measure(measuring, work, runs, file, notes)
    return [runs[each] for each in asked if each in runs], len(asked), complete


def _measure(
    measuring: Acceptance, work: Work, runs: dict[Asked, Accepted], file: Results | None, notes: list[str]
) -> bool:
    """Adds the runs that are missing; False if Ctrl-C ended it."""
    asked = {
        factor: {a for own in rows.values() for a in measuring.asked(own, factor)} for factor, rows in work.items()
    }
    missing = sum(each not in runs for own in asked.values() for each in own)
    with console.warnings_once(), Runs(missing) as shown:
        try:
            for factor, rows in work.items():
                if asked[factor] <= runs.keys():
                    continue
                lengths = ", ".join(f"{n:,}" for n in sorted({each.length for each in asked[factor]}))
                shown.say(f"Lengths {lengths}" + ("" if factor is None else f", the model stretched {factor:g} times"))
                try:
                    measuring.stretch(factor)
                except CapabilityError as error:
                    notes.append(f"Lengths {lengths} are left out: {error}")
                    continue
                for own in rows.values():
                    for run in measuring.measure(own, runs, lambda a: shown.told(_named(a))(a.method)):
                        runs[run.asked] = run
                        if file is not None:
                            file.add(run)
        except KeyboardInterrupt:
            return False
    return True


def _named(asked: Asked) -> str:
    return f"{Path(asked.sample).name}, {asked.length:,} tokens, {acceptance_report.called(asked.temperature)}"


def _show(found: dict[str, Any], levels: int, svg: Path | None) -> None:
    if not found["rows"]:
        return
    definitions = [*acceptance_report.DEFINITIONS, *([acceptance_report.DEPTHS] if levels else [])]
    console.report(acceptance_report.tables(found, levels), map(Line, found["notes"]), definitions)
    drawn = {} if svg is None else acceptance_report.figures(found)
    for temperature, chart in drawn.items():
        assert svg is not None
        path = svg if len(drawn) == 1 else svg.with_name(f"{svg.stem}-t{temperature:g}{svg.suffix}")
        bench_options.draw(chart, path)
