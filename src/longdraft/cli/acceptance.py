"""``longdraft bench acceptance`` and ``bench length``: mean accepted length and speed by context length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import longdraft
from longdraft.bench import charts
from longdraft.bench.data import SamplingScheme, ShortTextPolicy
from longdraft.bench.tables import Report, group_by
from longdraft.cli import console, measure_options, method_options, options
from longdraft.errors import CapabilityError

DEFAULT_LENGTHS = "512,1024,2048,4096,8192,16384,32768"
MIN_LENGTH, MAX_LENGTH = 1024, 131072  # the default lengths of ``bench length`` lie between them
_LENGTHS_HELP = "Prompt lengths in tokens; texts are cut to each. Beyond the model's context, YaRN is used."


@dataclass(frozen=True)
class LengthPromptOptions(measure_options.SeededPromptOptions):
    """Options of the prompts of ``bench length``."""

    limit: Annotated[int, typer.Option(min=1, help="Rows of each file to use.")] = 2


def acceptance(
    *,
    prompt_options: measure_options.SeededPromptOptions,
    lengths: Annotated[str, typer.Option(help=_LENGTHS_HELP)] = DEFAULT_LENGTHS,
    short: measure_options.ShortTexts = "leave",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to compare, separated by commas; options follow a method: longspec:nodes=20.",
            show_default="every draft that ships for the model",
        ),
    ] = None,
    draft_options: method_options.DraftOptions,
    temperature: Annotated[
        str, typer.Option("--temperature", "-t", help="Sampling temperatures, separated by commas; 0 is greedy.")
    ] = "0,1",
    sampling: Annotated[
        SamplingScheme,
        typer.Option(
            help="How drafts are verified at temperatures above 0: coupled samples the target at each node; standard "
            "uses rejection sampling."
        ),
    ] = "coupled",
    foresee: options.Foresee = True,
    model_options: options.ModelOptions,
    output: measure_options.ReportOptions,
    svg: Annotated[
        Path | None, typer.Option(help="Write a chart to this SVG file; with several temperatures, one file for each.")
    ] = None,
    user_files: options.UserFiles = None,
) -> None:
    """Measure mean accepted length by context length, greedy and sampled, with each method's own draft trees.

    Ctrl-C ends the run and shows the results so far.
    """
    from longdraft.bench import length_reports

    prompt_lengths = method_options.parse_ints("--lengths", lengths)
    temperatures = tuple(dict.fromkeys(method_options.parse_floats("--temperature", temperature)))
    if not temperatures or not prompt_lengths:
        raise options.SettingError("--lengths and --temperature must have at least one value.")
    for t in temperatures:
        longdraft.Sampling(temperature=t)  # raises for a bad temperature
    output.check_writable(svg=svg)
    if svg is not None:
        charts.check_available()

    def make_report(*report_args: Any) -> Report:
        report = length_reports.acceptance_report(*report_args)
        if svg is not None:
            by_temperature = group_by(report.document["rows"], "temperature")
            for rows in by_temperature:
                # Each temperature has its own file: chart-t0.svg, chart-t1.svg.
                suffix = "" if len(by_temperature) == 1 else f"-t{rows[0]['temperature']:g}"
                path = svg.with_name(f"{svg.stem}{suffix}{svg.suffix}")
                measure_options.write_file(path, length_reports.acceptance_chart(rows))
                console.note(f"The chart is in {path}.")
        return report

    _measure(
        make_report, methods=methods, draft_options=draft_options, prompt_options=prompt_options,
        model_options=model_options, output=output, lengths_for=lambda context_length: prompt_lengths,
        short_texts=short, temperatures=temperatures, scheme=sampling, contexts=prompt_lengths, plan="fixed",
        sampling=longdraft.Sampling(foresee=foresee),
    )  # fmt: skip


def bench_length(
    *,
    prompt_options: LengthPromptOptions,
    lengths: Annotated[
        str | None, typer.Option(help=_LENGTHS_HELP, show_default="1024, 2048, ... up to the model's context")
    ] = None,
    short: measure_options.ShortTexts = "join",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to compare, separated by commas; ar is added. Options follow a method: longspec:nodes=20.",
            show_default="every draft that ships for the model, else self",
        ),
    ] = None,
    draft_options: method_options.DraftOptions,
    plan: measure_options.Plan = "fixed",
    repeats: Annotated[int, typer.Option(min=1, help="Number of timed runs; the median is reported.")] = 2,
    model_options: options.ModelOptions,
    output: measure_options.ReportOptions,
    user_files: options.UserFiles = None,
) -> None:
    """For each prompt length, measure the mean accepted length to break even, and the one that each draft reaches.

    Decoding is greedy. Ctrl-C ends the run and shows the results so far.
    """
    from longdraft.bench import length_reports
    from longdraft.bench.settings import REFERENCE

    output.check_writable()
    prompt_lengths = None if lengths is None else method_options.parse_ints("--lengths", lengths)

    def lengths_for(context_length: int) -> Sequence[int]:
        return prompt_lengths or length_reports.doubling_lengths(MIN_LENGTH, min(context_length, MAX_LENGTH))

    _measure(
        length_reports.break_even_report, methods=methods, draft_options=draft_options, prompt_options=prompt_options,
        model_options=model_options, output=output, lengths_for=lengths_for, short_texts=short, temperatures=(0.0,),
        always_measured=(REFERENCE,), fallback_methods=("self",), repeats=repeats,
        contexts=prompt_lengths or (None,), plan=plan,
    )  # fmt: skip


def _measure(
    make_report: Callable[..., Report], methods: str | None, draft_options: method_options.DraftOptions,
    prompt_options: measure_options.SeededPromptOptions, model_options: options.ModelOptions,
    output: measure_options.ReportOptions, lengths_for: Callable[[int], Sequence[int]], short_texts: ShortTextPolicy,
    temperatures: tuple[float, ...], always_measured: Sequence[str] = (), fallback_methods: Sequence[str] = (),
    repeats: int = 1, scheme: SamplingScheme = "coupled", **settings_kwargs: Any,
) -> None:  # fmt: skip
    """Measures methods on prompts of several lengths. The model is loaded again for each YaRN factor.

    Args:
        make_report: makes a report from (records, methods, notes, True if no record is missing).
        methods: method names, separated by commas; None: the method of --draft.
        fallback_methods: used if there are neither --methods nor --draft, and no drafts ship for the model.
        lengths_for: returns the prompt lengths for a model's context length.
        always_measured: methods that are measured first, in any case.
        scheme: how the target is sampled above temperature 0.

    Raises:
        SettingError: a method is not longdraft's, or an option is set that no method has.
    """
    from longdraft.bench.acceptance import AcceptanceBench, default_methods, open_records
    from longdraft.bench.experiment import Experiment
    from longdraft.bench.peers import PEERS
    from longdraft.bench.settings import Settings
    from longdraft.model.runner import TargetRunner
    from longdraft.registry import kind_of

    names = None if methods is None else method_options.split_commas(methods)
    if names is None and draft_options.draft is not None:
        names = [kind_of(draft_options.draft).name]

    def make_settings(contenders: Sequence[str]) -> Settings:
        if names is None and not contenders:
            raise CapabilityError("No draft for this model comes with longdraft: name one with --draft, or --methods.")
        if not contenders or any(name in PEERS for name in contenders):
            raise options.SettingError("--methods takes one or more of the methods in `longdraft methods`.")
        with options.settings_checked():
            return Settings(
                tuple(dict.fromkeys((*always_measured, *contenders))), draft_options=draft_options.options(),
                contender_options=method_options.parse_contenders(contenders), **settings_kwargs,
                **prompt_options.settings_kwargs,
            )  # fmt: skip

    def load_stretched(yarn_factor: float) -> longdraft.LoadedModel:
        stretched = replace(model_options, rope_factor=yarn_factor * (model_options.rope_factor or 1))
        return stretched.load(lambda message: None)  # no messages, because the progress bar is on the screen

    settings = None if names is None else make_settings(names)  # before the model is loaded, if possible
    samples = prompt_options.read()
    with console.status() as status:
        loaded = model_options.load(status)
        if settings is None:
            settings = make_settings(default_methods(TargetRunner(loaded.model)) or fallback_methods)
        args = temperatures, model_options.name, status, repeats, scheme
        with options.settings_checked():
            bench = AcceptanceBench(loaded, settings, load_stretched, *args)
        lengths = lengths_for(bench.context_length)
        status(f"Cutting {len(samples)} texts to {len(set(lengths))} lengths")
        measurements = bench.steps(samples, lengths, short_texts)
    for note in bench.notes:
        console.note(note)
    file = None if output.results is None else open_records(output.results, bench.settings, bench.model_entry)
    experiment = Experiment(measurements, lambda run: run.asked, file)
    methods_run, notes = bench.settings.methods, bench.notes
    output.run(experiment, lambda complete: make_report(experiment.records, methods_run, notes, complete))
