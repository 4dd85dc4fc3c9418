"""``longdraft bench acceptance`` and ``bench length``: every draft, or every server, against the length of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

import longdraft
from longdraft.bench import tasks
from longdraft.bench.data import Short
from longdraft.cli import bench_options, console, measuring, method_options, options
from longdraft.errors import CapabilityError
from longdraft.model.embedded import EMBEDDED_ID

if TYPE_CHECKING:
    from longdraft.bench.acceptance import Acceptance
    from longdraft.bench.settings import Settings
    from longdraft.model.runner import TargetRunner

LENGTHS = "512,1024,2048,4096,8192,16384,32768"
FIRST, FARTHEST = 1024, 131072


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
    output: measuring.Rendered,
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
    settings = _settings(
        methods, drafting, _default,
        max_tokens=max_tokens, contexts=cut_to, seed=seed, raw=raw, ignore_eos=ignore_eos, plan="fixed",
        asked=wording.asked, sampling=longdraft.Sampling(foresee=foresee),
    )  # fmt: skip
    output.check(results=results)
    samples = tasks.read(data or [tasks.BUILT_IN], limit)
    hosted = _hosted(loading, settings, temperatures)
    steps = _steps(hosted, samples, cut_to, short)
    file = None if results is None else opened(results, hosted.settings, hosted.model)
    experiment = Experiment(steps, lambda run: run.asked, file)
    complete = measuring.run(experiment)
    output.show(length.acceptance(experiment.found, hosted.settings.methods, hosted.notes, complete, levels))
    measuring.end(experiment, complete)


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
    output: measuring.Rendered,
    composed: options.Load = None,
) -> None:
    """Measure what must be accepted at each length for speculation to pay, and what is: for methods here and servers.

    Greedy. Ctrl-C ends it with the figures so far.
    """
    from longdraft.bench import length
    from longdraft.bench import servers as serving
    from longdraft.bench.acceptance import by_default, opened
    from longdraft.bench.break_even import free
    from longdraft.bench.experiment import Experiment
    from longdraft.bench.settings import REFERENCE, Settings

    output.check(results=results)
    asked_for = None if lengths is None else method_options.whole_numbers("--lengths", lengths)
    samples = tasks.read(data or [tasks.BUILT_IN], limit)
    given: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "raw": raw, "ignore_eos": ignore_eos}
    hosted = None
    if url:
        if methods is not None or wording.asked:
            raise options.SettingError("--methods, --system and --no-think are for methods here: leave them out.")
        named = {name: address or name for name, _, address in (each.partition("=") for each in url)}
        servers = [serving.Server(name, address, api_key) for name, address in named.items()]
        cut_to = asked_for or length.doubled(FIRST, 4 * FIRST)
        steps = serving.steps(servers, samples, cut_to, max_tokens, repeats, ignore_eos)
        own, model = Settings((REFERENCE,), **given), {"name": "servers"}
        names, notes = tuple(named), [f"{each.name}: {each.model} at {each.url}" for each in servers]
    else:
        settings = _settings(
            methods, drafting, lambda target: by_default(target) or ("self",), (REFERENCE,),
            contexts=asked_for or (None,), plan=plan, asked=wording.asked, **given,
        )  # fmt: skip
        hosted = _hosted(loading, settings, (0.0,), repeats)
        cut_to = asked_for or length.doubled(FIRST, min(hosted.context, FARTHEST))
        steps = _steps(hosted, samples, cut_to, short)
        own, model, names, notes = hosted.settings, hosted.model, hosted.settings.methods, hosted.notes
    file = None if results is None else opened(results, own, model)
    # Runs without seconds, as files of earlier versions have them, are made again.
    experiment = Experiment(steps, lambda run: run.asked, file, usable=lambda run: run.seconds is not None)
    complete = measuring.run(experiment)
    calculated = []
    if complete and hosted is not None and hosted.target is not None:
        with console.status() as status:
            status("Timing verifications behind made-up texts")
            calculated = free(hosted.target, cut_to)
    output.show(length.break_even(experiment.found, names, calculated, notes, complete))
    measuring.end(experiment, complete)


def _default(target: TargetRunner) -> tuple[str, ...]:
    from longdraft.bench.acceptance import by_default

    found = by_default(target)
    if not found:
        raise CapabilityError("No draft for this model comes with longdraft: name one with --draft, or --methods.")
    return found


def _settings(
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


def _hosted(
    loading: options.ModelOptions,
    settings: Callable[[TargetRunner], Settings],
    temperatures: tuple[float, ...],
    repeats: int = 1,
) -> Acceptance:
    """The methods on a model that is loaded anew for each YaRN factor; only the first time it says how far it is."""
    from longdraft.bench.acceptance import Acceptance

    with console.status() as status, options.settings_checked():

        def load(factor: float | None) -> longdraft.LoadedModel:
            again = factor != loading.rope_factor  # then the runs' progress is on the screen
            return replace(loading, rope_factor=factor).load((lambda message: None) if again else status)

        name = loading.model or EMBEDDED_ID
        return Acceptance(load, settings, temperatures, name, loading.rope_factor, status, repeats)


def _steps(hosted: Acceptance, samples: Sequence[Any], cut_to: Sequence[int], short: Short) -> Any:
    """The steps for each text, cut to each length; remarks on texts are said."""
    with console.status() as status:
        status(f"Cutting {len(samples)} texts to {len(set(cut_to))} lengths")
        steps = hosted.steps(samples, cut_to, short)
    for note in hosted.notes:
        console.note(note)
    return steps
