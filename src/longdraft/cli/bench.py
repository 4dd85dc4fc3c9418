"""``longdraft bench``: methods beside each other on the same prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from longdraft.bench import scores
from longdraft.bench.tables import Report
from longdraft.cli import console, measure_options, method_options, options, processes

SELF_DRAFTING = "self:lookup=true"  # the default method on a CPU
METHODS_BY_DEFAULT = ("ar", "prompt-lookup", SELF_DRAFTING, "hf")
# Long enough to be a long prompt, short enough that all of it takes minutes on two CPU cores.
BUILT_IN_CONTEXT, QUICK_CONTEXT = 2048, 1024
TOKENS, QUICK_TOKENS = 64, 32
REPEATS, QUICK_REPEATS = 3, 1
QUICK_ROWS = 2


@dataclass(frozen=True)
class BenchPromptOptions(measure_options.SeededPromptOptions):
    """Prompts of ``bench``."""

    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="New tokens at most.", show_default=f"{TOKENS}")
    ] = None  # type: ignore[assignment]


def bench(
    *,
    prompting: BenchPromptOptions,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, with commas between; to compare with: hf (transformers' generate), hf-eager. Options of one "
            "behind colons: specpv:budget=512:selector=quest.",
            show_default=",".join(METHODS_BY_DEFAULT) + "; with --draft, its method in the place of the third",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"A first look: {QUICK_ROWS} rows of each file, {QUICK_TOKENS} tokens, one round; other options win.",
        ),
    ] = False,
    drafting: method_options.DraftOptions,
    plan: options.Plan = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Cut the documents so that prompts have at most this many tokens; several with commas between.",
            show_default=f"as they are; {BUILT_IN_CONTEXT} without --data",
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Prompts decoded together; several with commas between.")] = "1",
    repeats: Annotated[
        int | None, typer.Option(help="Timed rounds; their median counts.", show_default=f"{REPEATS}")
    ] = None,
    choosing: options.SamplingOptions,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold/--one-prefill",
            help="Let every method read the prompts itself, or ar for all of ours (long prompts).",
        ),
    ] = True,
    loading: options.ModelOptions,
    offload: options.Offload = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Look into some rounds after the timed ones: where their time goes."),
    ] = False,
    output: measure_options.ReportOptions,
    composed: options.Load = None,
) -> None:
    """Measure methods on the same prompts, in turn, against ar (and against transformers with hf).

    Without options: summaries of and quotations from three modules of Python's standard library, 2,048 prompt tokens,
    64 new ones, three rounds. Ctrl-C ends it with the figures so far.
    """

    from longdraft.bench import report
    from longdraft.bench.experiment import Experiment
    from longdraft.bench.prompts import encode_prompts, make_batches
    from longdraft.bench.records import RecordFile
    from longdraft.bench.results import bench_header
    from longdraft.bench.run import BatchResult, Bench
    from longdraft.bench.settings import Settings
    from longdraft.drafts.kinds import kind_of
    from longdraft.model.stored_model import has_stored_weights

    if quick:  # other options win
        prompting = replace(
            prompting,
            limit=prompting.limit or QUICK_ROWS,
            max_tokens=QUICK_TOKENS if prompting.max_tokens is None else prompting.max_tokens,
        )
    tokens = TOKENS if prompting.max_tokens is None else prompting.max_tokens
    rounds = repeats if repeats is not None else QUICK_REPEATS if quick else REPEATS
    contexts: tuple[int | None, ...] = (None,)
    if context is not None:
        contexts = method_options.parse_ints("--context", context)
    elif not prompting.data:
        contexts = (QUICK_CONTEXT if quick else BUILT_IN_CONTEXT,)
    names = METHODS_BY_DEFAULT if methods is None else tuple(method_options.split_commas(methods))
    if methods is None and drafting.draft is not None:  # its method takes the place of the one that drafts itself
        names = tuple(kind_of(drafting.draft).name if name == SELF_DRAFTING else name for name in names)
    with options.settings_checked():
        settings = Settings(
            names, tokens, contexts, method_options.parse_ints("--batch", batch), rounds, choosing.sampling(),
            prompting.seed, prompting.raw, prompting.ignore_eos, cold,
            draft_options=drafting.options(),
            plan=plan,
            offload=offload,
            contender_options=method_options.contender_options(names),
            profile=profile,
            asked=prompting.asked,
        )  # fmt: skip
    processes.check_options({"--results": output.results, "--profile": profile})
    output.check_writable()
    samples = prompting.read()
    if lacking := scores.missing_rouge_note(samples):
        console.note(lacking)
    with console.status() as status:
        loaded = loading.load(status)
        status(f"Encoding {len(samples)} samples")
        prompts = encode_prompts(samples, loaded, settings)
        groups, left_over = make_batches(prompts, settings.batches)
        plain = replace(loading, weights="float32", arithmetic=None)
        unpacked = (lambda: plain.load(status)) if has_stored_weights(loaded.model) else None
        with options.settings_checked():
            hosted = Bench(loaded, settings, progress=status, load_dequantized=unpacked)
    file = None
    if output.results is not None:
        about = bench_header(hosted, prompts, loading.name, prompting.sources, prompting.limit)
        file = RecordFile(output.results, about, BatchResult)
    for size, left in left_over.items():
        if left:
            console.note(f"{left} sample{'s are' if left > 1 else ' is'} left out of batches of {size}.")
    experiment = Experiment(hosted.steps(groups), lambda measured: measured.key, file)

    def made(complete: bool) -> Report:
        found = report.document(hosted.names, experiment.records, hosted.notes, complete)
        return report.make_report(found, lambda ids: str(loaded.tokenizer.decode(ids)))

    output.run(experiment, made, "batches")
