"""``longdraft bench quality``: what partial verification costs in quality."""

from __future__ import annotations

from typing import Annotated

import typer

from longdraft.bench import tasks
from longdraft.bench.scores import rouge_l
from longdraft.bench.thinking import thoughtful
from longdraft.cli import bench_options, console, measuring, method_options, options
from longdraft.model.embedded import EMBEDDED_ID


def quality(
    *,
    data_files: Annotated[
        list[str], typer.Option("--data", help="JSONL, or a data set by name, as for bench; repeatable.")
    ],
    budget: Annotated[str, typer.Option(help="Retrieved tokens, one or several with commas between.")] = "512,1024",
    margin: Annotated[
        str, typer.Option(help="Tokens that may wait for a full pass, one or several with commas between.")
    ] = "20",
    selector: Annotated[
        str, typer.Option(help="What ranks the blocks, one or several: minmax, quest, mean-key, attention, streaming.")
    ] = "minmax",
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Plain decoding on a KV cache in bfloat16 or int8 too, one or both.", show_default="neither"),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="The method whose drafter is used.", show_default="the first that has a draft")
    ] = None,
    drafting: method_options.DraftOptions,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="A further option of specpv, such as reduction=max; repeatable."),
    ] = None,
    limit: bench_options.Limit = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens at most.")] = 128,
    answer_tokens: Annotated[
        int,
        typer.Option(
            help="Let the model think first, in --max-tokens tokens; then ask for the answer, which has this many at "
            "most and is what --data's references score.",
            show_default="the text is the answer",
        ),
    ] = 0,
    context: Annotated[
        int | None, typer.Option(help="Cut the documents so that prompts have at most this many tokens.")
    ] = None,
    ignore_eos: bench_options.IgnoreEos = False,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Above 0: all are sampled, with the same random numbers.")
    ] = 0.0,
    raw: bench_options.Raw = False,
    wording: options.TemplateOptions,
    loading: options.ModelOptions,
    results: bench_options.Results = None,
    output: measuring.Rendered,
) -> None:
    """Measure the quality of specpv and of a rounded KV: likeness of texts (ROUGE-L), the target's nats, scores."""
    from longdraft.bench import quality_report, record_files
    from longdraft.bench.prompts import prepare
    from longdraft.bench.quality import METHOD, Quality, QualitySettings, variants
    from longdraft.bench.settings import Settings as Prompts

    given = method_options.method_options(METHOD, option or []) | drafting.options()
    given |= {} if drafter is None else {"drafter": drafter}
    budgets, margins = (
        method_options.whole_numbers("--budget", budget),
        method_options.whole_numbers("--margin", margin),
    )
    with options.settings_checked():
        settings = QualitySettings(
            variants(budgets, margins, method_options.words(selector)),
            max_tokens,
            ignore_eos,
            tuple(method_options.words(kv_dtype or "")),
            given,
            temperature,
            answer_tokens,
        )
        prompting = Prompts(max_tokens=settings.new_tokens, contexts=(context,), raw=raw, asked=wording.asked)
    output.check(results=results)
    samples = tasks.read(data_files, limit)
    if answer_tokens:
        samples = [thoughtful(sample) for sample in samples]
    rouge_l()  # missing, it is missed before anything is loaded
    with console.status() as status:
        loaded = loading.load(status)
        status("Encoding")
        prompts = {f"{i}. {p.sample.origin}": p for i, p in enumerate(prepare(samples, loaded, prompting), 1)}
        with options.settings_checked():
            hosted = Quality(loaded, settings)
        for note in hosted.uncut([len(p.tokens) + settings.new_tokens for p in prompts.values()]):
            console.note(note)
    tokens = [prompt.tokens for prompt in prompts.values()]
    header = record_files.header("longdraft-quality", settings.header(), loaded, loading.model or EMBEDDED_ID, tokens)
    experiment = record_files.experiment(
        dict.fromkeys(prompts, len(hosted.names)),
        lambda unit, tick: hosted.compare(prompts[unit], tick),
        results,
        header,
    )
    complete = measuring.run(experiment, "prompts")
    output.show(quality_report.shown(hosted, [record["measured"] for record in experiment.found], complete))
    measuring.end(experiment, complete, "prompts")
