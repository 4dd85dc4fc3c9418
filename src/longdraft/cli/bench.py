"""``longdraft bench``: compares methods on the same prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from longdraft.bench import scores
from longdraft.bench.tables import Report
from longdraft.cli import console, measure_options, method_options, options, processes

SELF_DRAFTING = "self:lookup=true"  # the default method on a CPU
DEFAULT_METHODS = ("ar", "prompt-lookup", SELF_DRAFTING, "hf")
# Defaults without --quick and with it. With these limits, the built-in prompts take minutes on two CPU cores.
BUILT_IN_CONTEXT, QUICK_CONTEXT = 2048, 1024
MAX_TOKENS, QUICK_MAX_TOKENS = 64, 32
REPEATS, QUICK_REPEATS = 3, 1
QUICK_ROWS = 2


@dataclass(frozen=True)
class BenchPromptOptions(measure_options.SeededPromptOptions):
    """Options of the prompts of ``bench``."""

    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", help="Maximum number of new tokens.", show_default=f"{MAX_TOKENS}"),
    ] = None  # type: ignore[assignment]  # None: MAX_TOKENS, or QUICK_MAX_TOKENS


def bench(
    *,
    prompt_options: BenchPromptOptions,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to compare, separated by commas; also hf (transformers' generate) and hf-eager. Options "
            "follow a method: specpv:budget=512:selector=quest.",
            show_default=",".join(DEFAULT_METHODS) + "; with --draft, its method instead of the third",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"Use {QUICK_ROWS} rows of a file, {QUICK_MAX_TOKENS} new tokens, one repeat, where no option is set.",
        ),
    ] = False,
    draft_options: method_options.DraftOptions,
    plan: options.Plan = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Longest prompt in tokens; documents are cut to it. Takes several, separated by commas.",
            show_default=f"not cut; {BUILT_IN_CONTEXT} without --data",
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch size; takes several, separated by commas.")] = "1",
    repeats: Annotated[
        int | None, typer.Option(help="Number of timed repeats; the median counts.", show_default=f"{REPEATS}")
    ] = None,
    sampling_options: options.SamplingOptions,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold/--one-prefill",
            help="Prefill the prompts with every method, or once with ar for all (faster for long prompts).",
        ),
    ] = True,
    model_options: options.ModelOptions,
    offload: options.Offload = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile some rounds after the timed ones, to show where the time goes.")
    ] = False,
    output: measure_options.ReportOptions,
    user_files: options.UserFiles = None,
) -> None:
    """Measure methods on the same prompts, in turn, against ar (plain decoding) and hf (transformers).

    Without options, prompts ask for summaries of, and quotations from, three modules of Python's standard library:
    2,048 prompt tokens, 64 new tokens, three repeats. Ctrl-C ends the run and shows the results so far.
    """
    from longdraft.bench import report
    from longdraft.bench.experiment import Experiment
    from longdraft.bench.prompts import encode_prompts, make_batches
    from longdraft.bench.records import RecordFile
    from longdraft.bench.results import bench_header
    from longdraft.bench.run import BatchResult, Bench
    from longdraft.bench.settings import Settings
    from longdraft.model.quant.stored_model import has_stored_weights
    from longdraft.registry import kind_of

    if quick:
        prompt_options = replace(prompt_options, limit=prompt_options.limit or QUICK_ROWS)
    if prompt_options.max_tokens is None:
        prompt_options = replace(prompt_options, max_tokens=QUICK_MAX_TOKENS if quick else MAX_TOKENS)
    if repeats is None:
        repeats = QUICK_REPEATS if quick else REPEATS
    contexts: tuple[int | None, ...] = (None,)
    if context is not None:
        contexts = method_options.parse_ints("--context", context)
    elif not prompt_options.data:
        contexts = (QUICK_CONTEXT if quick else BUILT_IN_CONTEXT,)
    names = DEFAULT_METHODS if methods is None else tuple(method_options.split_commas(methods))
    if methods is None and draft_options.draft is not None:
        names = tuple(kind_of(draft_options.draft).name if name == SELF_DRAFTING else name for name in names)
    with options.settings_checked():
        settings = Settings(
            names, contexts=contexts, batches=method_options.parse_ints("--batch", batch), repeats=repeats,
            sampling=sampling_options.sampling(), cold=cold, draft_options=draft_options.options(), plan=plan,
            contender_options=method_options.parse_contenders(names), offload=offload, profile=profile,
            **prompt_options.settings_kwargs,
        )  # fmt: skip
    processes.check_options({"--results": output.results, "--profile": profile})
    output.check_writable()
    samples = prompt_options.read()
    if note := scores.missing_rouge_note(samples):
        console.note(note)
    with console.status() as status:
        loaded = model_options.load(status)
        status(f"Encoding {len(samples)} samples")
        prompts = encode_prompts(samples, loaded, settings)
        batches, left_over = make_batches(prompts, settings.batches)
        float_options = replace(model_options, weights="float32", arithmetic=None)  # for hf and hf-eager
        load_dequantized = (lambda: float_options.load(status)) if has_stored_weights(loaded.model) else None
        with options.settings_checked():
            bench = Bench(loaded, settings, progress=status, load_dequantized=load_dequantized)
    file = None
    if output.results is not None:
        header = bench_header(bench, prompts, model_options.name, prompt_options.sources, prompt_options.limit)
        file = RecordFile(output.results, header, BatchResult)
    for size, count in left_over.items():  # batch size, number of samples
        if count:
            console.note(f"{count} sample{'s are' if count > 1 else ' is'} left out of batches of {size}: too few.")
    experiment = Experiment(bench.steps(batches), lambda result: result.key, file)

    def make_report(complete: bool) -> Report:
        document = report.document(bench.names, experiment.records, bench.notes, complete)
        return report.make_report(document, lambda ids: str(loaded.tokenizer.decode(ids)))

    output.run(experiment, make_report, "batches")
