"""``longdraft bench quality``: how partial verification and a quantized KV cache change the text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import typer

from longdraft.bench.scores import rouge_l
from longdraft.cli import console, measure_options, method_options, options


@dataclass(frozen=True, kw_only=True)
class QualityPromptOptions(measure_options.PromptOptions):
    """Prompt options. --data is required: field() removes the default of the base class."""

    data: Annotated[list[str], typer.Option("--data", help="JSONL or data sets, as for bench; repeatable.")] = field()
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum number of new tokens.")] = 128


def quality(
    *,
    prompt_options: QualityPromptOptions,
    budget: Annotated[str, typer.Option(help="Budgets of specpv in tokens, separated by commas.")] = "512,1024",
    margin: Annotated[str, typer.Option(help="Margins of specpv in tokens, separated by commas.")] = "20",
    selector: Annotated[
        str,
        typer.Option(help="Selectors of specpv, separated by commas: minmax, quest, mean-key, attention or streaming."),
    ] = "minmax",
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Also measure a KV cache in bfloat16, int8 or int4; several by commas.", show_default="none of them"
        ),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Method whose drafter is used.", show_default="the first that has a draft")
    ] = None,
    draft_options: method_options.DraftOptions,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="Another option of specpv, such as reduction=max; repeatable."),
    ] = None,
    context: Annotated[int | None, typer.Option(help="Longest prompt in tokens; documents are cut to it.")] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Sampling temperature; all runs have the same random numbers.")
    ] = 0.0,
    answer_tokens: Annotated[
        int,
        typer.Option(
            help="Let the model think for --max-tokens tokens, then ask for the answer: at most this many tokens, "
            "which the references of --data score.",
            show_default="the text is the answer",
        ),
    ] = 0,
    model_options: options.ModelOptions,
    output: measure_options.ReportOptions,
) -> None:
    """Measure texts of specpv and of a quantized KV cache: ROUGE-L to plain decoding, -log p in nats, task scores."""
    from longdraft.bench.experiment import Unit, unit_experiment
    from longdraft.bench.prompts import encode_prompts
    from longdraft.bench.quality import METHOD, QualityBench, QualitySettings, make_variants
    from longdraft.bench.results import unit_header
    from longdraft.bench.settings import Settings
    from longdraft.bench.thinking import with_thinking

    method_args = method_options.parse_options(METHOD, option or []) | draft_options.options()
    method_args |= {} if drafter is None else {"drafter": drafter}
    budgets, margins = method_options.parse_ints("--budget", budget), method_options.parse_ints("--margin", margin)
    with options.settings_checked():
        settings = QualitySettings(
            make_variants(budgets, margins, method_options.split_commas(selector)), prompt_options.max_tokens,
            prompt_options.ignore_eos, tuple(method_options.split_commas(kv_dtype or "")), method_args, temperature,
            answer_tokens,
        )  # fmt: skip
        prompt_settings = Settings(contexts=(context,), **prompt_options.settings_kwargs)
        prompt_settings = replace(prompt_settings, max_tokens=settings.new_tokens)
    output.check_writable()
    samples = [with_thinking(sample) if answer_tokens else sample for sample in prompt_options.read()]
    rouge_l()  # raises at once if the package rouge-score is missing
    with console.status() as status:
        loaded = model_options.load(status)
        status("Encoding")
        encoded = encode_prompts(samples, loaded, prompt_settings)
        prompts = {f"{i}. {p.sample.origin}": p for i, p in enumerate(encoded, 1)}
        with options.settings_checked():
            bench = QualityBench(loaded, settings)
        for note in bench.notes_on_short_prompts([len(p.token_ids) + settings.new_tokens for p in prompts.values()]):
            console.note(note)
    token_ids = [prompt.token_ids for prompt in prompts.values()]
    header = unit_header("longdraft-quality", settings.header(), loaded, model_options.name, token_ids)
    units = {name: Unit(len(bench.names), partial(bench.measure, prompt)) for name, prompt in prompts.items()}
    experiment = unit_experiment(units, output.results, header)
    output.run(experiment, lambda done: bench.report([r["measured"] for r in experiment.records], done), "prompts")
