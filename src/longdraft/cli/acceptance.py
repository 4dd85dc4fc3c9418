"""``longdraft bench acceptance`` and ``bench length``: every draft, or every server, against the length of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import longdraft
from longdraft.bench import charts
from longdraft.bench.data import Short
from longdraft.bench.tables import Report, grouped
from longdraft.cli import console, measuring, method_options, options
from longdraft.errors import CapabilityError

if TYPE_CHECKING:
    from longdraft.bench.acceptance import Acceptance, Accepted, Asked
    from longdraft.bench.experiment import Step
    from longdraft.bench.settings import Settings
    from longdraft.model.runner import TargetRunner

LENGTHS = "512,1024,2048,4096,8192,16384,32768"
FIRST, FARTHEST = 1024, 131072
_CUT = "Tokens that prompts are cut to; YaRN stretches the model for those beyond its context."


@dataclass(frozen=True)
class FewRows(measuring.Sampled):
    """Prompts of ``bench length``."""

    limit: Annotated[int, typer.Option(min=1, help="Rows of each file.")] = 2


def acceptance(
    *,
    prompting: measuring.Sampled,
    lengths: Annotated[str, typer.Option(help=_CUT)] = LENGTHS,
    short: measuring.ShortTexts = Short.leave,
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
    loading: options.ModelOptions,
    output: measuring.Rendered,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the figure; of several temperatures, one each: NAME-t1.svg.")
    ] = None,
    composed: options.Load = None,
) -> None:
    """Measure mean accepted length against context length: every draft, greedy and sampled, with the papers' trees.

    Ctrl-C ends it with the figures so far.
    """
    from longdraft.bench import length
    from longdraft.bench.acceptance import opened
    from longdraft.bench.experiment import Experiment

    cut_to = method_options.whole_numbers("--lengths", lengths)
    temperatures = tuple(dict.fromkeys(method_options.numbers("--temperature", temperature)))
    if not temperatures or not cut_to:
        raise options.SettingError("--lengths and --temperature must name one value at least.")
    for t in temperatures:
        longdraft.Sampling(temperature=t)
    sampling = longdraft.Sampling(foresee=foresee)
    settings = _settings(methods, drafting, prompting, (), contexts=cut_to, plan="fixed", sampling=sampling)
    output.check(svg=svg)
    if svg is not None:
        charts.available()
    hosted, steps = _hosted(loading, settings, prompting, lambda context: cut_to, short, temperatures)
    file = None if output.results is None else opened(output.results, hosted.settings, hosted.model)
    experiment = Experiment(steps, lambda run: run.asked, file)
    names, notes = hosted.settings.methods, hosted.notes

    def made(complete: bool) -> Report:
        report = length.acceptance(experiment.found, names, notes, complete)
        if svg is not None:
            drawn = grouped(report.document["rows"], "temperature")
            for own in drawn:
                which = "" if len(drawn) == 1 else f"-t{own[0]['temperature']:g}"
                path = svg.with_name(f"{svg.stem}{which}{svg.suffix}")
                measuring.write(path, length.chart(own))
                console.note(f"The figure is in {path}.")
        return report

    output.measure(experiment, made)


def bench_length(
    *,
    prompting: FewRows,
    lengths: Annotated[
        str | None, typer.Option(help=_CUT, show_default="1024, 2048, ... as far as the model goes")
    ] = None,
    short: measuring.ShortTexts = Short.join,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, with commas between; options of one behind colons. ar comes by itself.",
            show_default="every draft that comes along for the model, else self",
        ),
    ] = None,
    drafting: method_options.DraftOptions,
    plan: measuring.Plan = "fixed",
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure servers instead: NAME=http://host:port of an OpenAI-compatible one; repeatable. Break-even "
            "needs one that decodes plainly, by the name ar.",
            show_default="none",
        ),
    ] = None,
    api_key: Annotated[str, typer.Option("--api-key", help="For servers that ask for one.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the fastest counts.")] = 2,
    loading: options.ModelOptions,
    output: measuring.Rendered,
    composed: options.Load = None,
) -> None:
    """Measure what must be accepted at each length for speculation to pay, and what is: for methods here and servers.

    Greedy. Ctrl-C ends it with the figures so far.
    """
    from longdraft.bench import length
    from longdraft.bench import servers as serving
    from longdraft.bench.acceptance import opened
    from longdraft.bench.experiment import Experiment
    from longdraft.bench.settings import REFERENCE, Settings

    output.check()
    asked_for = None if lengths is None else method_options.whole_numbers("--lengths", lengths)
    if url:
        if methods is not None or prompting.asked:
            raise options.SettingError("--methods, --system and --no-think are for methods here: leave them out.")
        named = {name: address or name for name, _, address in (each.partition("=") for each in url)}
        servers = [serving.Server(name, address, api_key) for name, address in named.items()]
        cut_to = asked_for or length.doubled(FIRST, 4 * FIRST)
        steps = serving.steps(servers, prompting.read(), cut_to, prompting.max_tokens, repeats, prompting.ignore_eos)
        own, model = Settings((REFERENCE,), **_given(prompting)), {"name": "servers"}
        names, notes = tuple(named), [f"{each.name}: {each.model} at {each.url}" for each in servers]
    else:

        def lengths_of(context: int) -> Sequence[int]:
            return asked_for or length.doubled(FIRST, min(context, FARTHEST))

        settings = _settings(
            methods, drafting, prompting, ("self",), (REFERENCE,),
            contexts=asked_for or (None,), plan=plan,
        )  # fmt: skip
        hosted, steps = _hosted(loading, settings, prompting, lengths_of, short, (0.0,), repeats)
        own, model, names, notes = hosted.settings, hosted.model, hosted.settings.methods, hosted.notes
    file = None if output.results is None else opened(output.results, own, model)
    experiment = Experiment(steps, lambda run: run.asked, file)
    output.measure(experiment, lambda complete: length.break_even(experiment.found, names, notes, complete))


def _given(prompting: measuring.Sampled) -> dict[str, Any]:
    return {name: getattr(prompting, name) for name in ("max_tokens", "seed", "raw", "ignore_eos", "asked")}


def _settings(
    methods: str | None,
    drafting: method_options.DraftOptions,
    prompting: measuring.Sampled,
    otherwise: Sequence[str],
    always: Sequence[str] = (),
    **more: Any,
) -> Callable[[TargetRunner], Settings]:
    """Settings for a target. Those of methods that are named are checked at once, before a model is read.

    Args:
        methods: with commas between; None: the given draft's, else those by default, else ``otherwise``.
        always: methods that come first, named or not. more: further arguments of ``Settings``.

    Raises:
        SettingError: no method of ours, or an option that none of them has.
    """
    from longdraft.bench.acceptance import by_default
    from longdraft.bench.peers import PEERS
    from longdraft.bench.settings import Settings
    from longdraft.drafts.kinds import kind_of

    names = None if methods is None else method_options.words(methods)
    if names is None and drafting.draft is not None:
        names = [kind_of(drafting.draft).name]

    def made(names: Sequence[str]) -> Settings:
        if not names or any(name in PEERS for name in names):
            raise options.SettingError("--methods takes methods of longdraft, one at least: see `longdraft methods`.")
        with options.settings_checked():
            return Settings(
                tuple(dict.fromkeys((*always, *names))), draft_options=drafting.options(),
                own_options=method_options.contender_options(names), **_given(prompting), **more,
            )  # fmt: skip

    chosen = None if names is None else made(names)

    def settings(target: TargetRunner) -> Settings:
        if not (found := by_default(target) or otherwise):
            raise CapabilityError("No draft for this model comes with longdraft: name one with --draft, or --methods.")
        return made(found)

    return settings if chosen is None else lambda target: chosen


def _hosted(
    loading: options.ModelOptions,
    settings: Callable[[TargetRunner], Settings],
    prompting: measuring.Sampled,
    lengths: Callable[[int], Sequence[int]],
    short: Short,
    temperatures: tuple[float, ...],
    repeats: int = 1,
) -> tuple[Acceptance, list[Step[Asked, Accepted]]]:
    """The methods on a model that is loaded anew for each YaRN factor, and a step for each text.

    Args:
        lengths: of texts, by the model's context.
    """
    from longdraft.bench.acceptance import Acceptance

    samples = prompting.read()
    with console.status() as status:

        def load(factor: float | None) -> longdraft.LoadedModel:
            again = factor != loading.rope_factor  # then the runs' progress is on the screen
            return replace(loading, rope_factor=factor).load((lambda message: None) if again else status)

        with options.settings_checked():
            hosted = Acceptance(load, settings, temperatures, loading.name, loading.rope_factor, status, repeats)
        cut_to = lengths(hosted.context)
        status(f"Cutting {len(samples)} texts to {len(set(cut_to))} lengths")
        steps = hosted.steps(samples, cut_to, short)
    for note in hosted.notes:
        console.note(note)
    return hosted, steps
