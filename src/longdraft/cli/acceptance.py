"""``longdraft bench acceptance`` and ``bench length``: every draft against the length of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import longdraft
from longdraft.bench import charts
from longdraft.bench.data import SamplingScheme, ShortTextPolicy
from longdraft.bench.tables import Report, group_by
from longdraft.cli import console, measure_options, method_options, options
from longdraft.errors import CapabilityError

if TYPE_CHECKING:
    from longdraft.model.runner import TargetRunner

LENGTHS = "512,1024,2048,4096,8192,16384,32768"
MIN_LENGTH, MAX_LENGTH = 1024, 131072
_CUT = "Tokens that prompts are cut to; YaRN stretches the model for those beyond its context."


@dataclass(frozen=True)
class LengthPromptOptions(measure_options.SeededPromptOptions):
    """Prompts of ``bench length``."""

    limit: Annotated[int, typer.Option(min=1, help="Rows of each file.")] = 2


def acceptance(
    *,
    prompting: measure_options.SeededPromptOptions,
    lengths: Annotated[str, typer.Option(help=_CUT)] = LENGTHS,
    short: measure_options.ShortPrompts = "leave",
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
    sampling: Annotated[
        SamplingScheme,
        typer.Option(help="At T > 0: coupled, a draw of the target's a token; standard, the papers' rejection."),
    ] = "coupled",
    foresee: options.Foresee = True,
    loading: options.ModelOptions,
    output: measure_options.ReportOptions,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the figure; of several temperatures, one each: NAME-t1.svg.")
    ] = None,
    composed: options.Load = None,
) -> None:
    """Measure mean accepted length against context length: every draft, greedy and sampled, with the papers' trees.

    Ctrl-C ends it with the figures so far.
    """
    from longdraft.bench import length_reports

    cut_to = method_options.parse_ints("--lengths", lengths)
    temperatures = tuple(dict.fromkeys(method_options.parse_floats("--temperature", temperature)))
    if not temperatures or not cut_to:
        raise options.SettingError("--lengths and --temperature must name one value at least.")
    for t in temperatures:
        longdraft.Sampling(temperature=t)
    output.check_writable(svg=svg)
    if svg is not None:
        charts.check_available()

    def report(*found: Any) -> Report:
        report = length_reports.acceptance_report(*found)
        if svg is not None:
            drawn = group_by(report.document["rows"], "temperature")
            for own in drawn:
                which = "" if len(drawn) == 1 else f"-t{own[0]['temperature']:g}"
                path = svg.with_name(f"{svg.stem}{which}{svg.suffix}")
                measure_options.write_file(path, length_reports.acceptance_chart(own))
                console.note(f"The figure is in {path}.")
        return report

    _measure(
        report, methods, drafting, prompting, loading, output, lambda context: cut_to, short, temperatures,
        scheme=sampling, contexts=cut_to, plan="fixed", sampling=longdraft.Sampling(foresee=foresee),
    )  # fmt: skip


def bench_length(
    *,
    prompting: LengthPromptOptions,
    lengths: Annotated[
        str | None, typer.Option(help=_CUT, show_default="1024, 2048, ... as far as the model goes")
    ] = None,
    short: measure_options.ShortPrompts = "join",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, with commas between; options of one behind colons. ar comes by itself.",
            show_default="every draft that comes along for the model, else self",
        ),
    ] = None,
    drafting: method_options.DraftOptions,
    plan: measure_options.Plan = "fixed",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; their median counts.")] = 2,
    loading: options.ModelOptions,
    output: measure_options.ReportOptions,
    composed: options.Load = None,
) -> None:
    """Measure what must be accepted at each length for speculation to pay, and what is.

    Greedy. Ctrl-C ends it with the figures so far.
    """
    from longdraft.bench import length_reports
    from longdraft.bench.settings import REFERENCE

    output.check_writable()
    cut_to = None if lengths is None else method_options.parse_ints("--lengths", lengths)

    def lengths_of(context: int) -> Sequence[int]:
        return cut_to or length_reports.doubling_lengths(MIN_LENGTH, min(context, MAX_LENGTH))

    _measure(
        length_reports.break_even_report, methods, drafting, prompting, loading, output, lengths_of, short, (0.0,),
        (REFERENCE,), ("self",), repeats, contexts=cut_to or (None,), plan=plan,
    )  # fmt: skip


def _measure(
    report: Callable[..., Report],
    methods: str | None,
    drafting: method_options.DraftOptions,
    prompting: measure_options.SeededPromptOptions,
    loading: options.ModelOptions,
    output: measure_options.ReportOptions,
    lengths: Callable[[int], Sequence[int]],
    short: ShortTextPolicy,
    temperatures: tuple[float, ...],
    always: Sequence[str] = (),
    otherwise: Sequence[str] = (),
    repeats: int = 1,
    scheme: SamplingScheme = "coupled",
    **more: Any,
) -> None:
    """Measures methods on texts of several lengths; the model is loaded anew for each YaRN factor.

    Args:
        report: makes the report of the runs, the methods, notes, and whether no run is missing.
        methods: with commas between, checked before a model is read; None: the given draft's, else those that come
            along for the model, else ``otherwise``.
        lengths: of texts, by the model's context.
        always: methods that come first, named or not. more: further settings of the bench.

    Raises:
        SettingError: no method of ours, or an option that none of them has.
    """
    from longdraft.bench.acceptance import AcceptanceBench, default_methods, open_records
    from longdraft.bench.experiment import Experiment
    from longdraft.bench.peers import PEERS
    from longdraft.bench.settings import Settings
    from longdraft.drafts.kinds import kind_of

    names = None if methods is None else method_options.split_commas(methods)
    if names is None and drafting.draft is not None:
        names = [kind_of(drafting.draft).name]
    more |= {name: getattr(prompting, name) for name in ("max_tokens", "seed", "raw", "ignore_eos", "asked")}

    def made(names: Sequence[str]) -> Settings:
        if not names or any(name in PEERS for name in names):
            raise options.SettingError("--methods takes methods of longdraft, one at least: see `longdraft methods`.")
        with options.settings_checked():
            return Settings(
                tuple(dict.fromkeys((*always, *names))), draft_options=drafting.options(),
                contender_options=method_options.contender_options(names), **more,
            )  # fmt: skip

    chosen = None if names is None else made(names)

    def settings(target: TargetRunner) -> Settings:
        if chosen is not None:
            return chosen
        if not (found := default_methods(target) or otherwise):
            raise CapabilityError("No draft for this model comes with longdraft: name one with --draft, or --methods.")
        return made(found)

    samples = prompting.read()
    with console.status() as status:

        def load(factor: float | None) -> longdraft.LoadedModel:
            if factor is None:
                return loading.load(status)
            # The runs' progress is on the screen.
            return replace(loading, rope_factor=factor * (loading.rope_factor or 1)).load(lambda message: None)

        with options.settings_checked():
            hosted = AcceptanceBench(load, settings, temperatures, loading.name, status, repeats, scheme)
        cut_to = lengths(hosted.context_length)
        status(f"Cutting {len(samples)} texts to {len(set(cut_to))} lengths")
        steps = hosted.steps(samples, cut_to, short)
    for note in hosted.notes:
        console.note(note)
    file = None if output.results is None else open_records(output.results, hosted.settings, hosted.model_entry)
    experiment = Experiment(steps, lambda run: run.asked, file)
    output.run(experiment, lambda complete: report(experiment.records, hosted.settings.methods, hosted.notes, complete))
