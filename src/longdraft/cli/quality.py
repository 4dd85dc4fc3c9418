"""``longdraft bench quality``: what partial verification costs in quality."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer

from longdraft.bench.scores import rouge_l
from longdraft.cli import console, measure_options, method_options, options


@dataclass(frozen=True, kw_only=True)
class QualityPromptOptions(measure_options.PromptOptions):
    """Prompts that are named."""

    data: Annotated[
        list[str], typer.Option("--data", help="JSONL, or a data set by name, as for bench; repeatable.")
    ] = field()
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens at most.")] = 128


def quality(
    *,
    prompting: QualityPromptOptions,
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
    context: Annotated[
        int | None, typer.Option(help="Cut the documents so that prompts have at most this many tokens.")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Above 0: all are sampled, with the same random numbers.")
    ] = 0.0,
    loading: options.ModelOptions,
    output: measure_options.ReportOptions,
) -> None:
    """Measure the quality of specpv and of a rounded KV: likeness of texts (ROUGE-L), the target's nats, scores."""
    from longdraft.bench.experiment import Unit, unit_experiment
    from longdraft.bench.prompts import encode_prompts
    from longdraft.bench.quality import METHOD, QualityBench, QualitySettings, make_variants
    from longdraft.bench.results import unit_header
    from longdraft.bench.settings import Settings

    given = method_options.method_options(METHOD, option or []) | drafting.options()
    given |= {} if drafter is None else {"drafter": drafter}
    budgets, margins = (
        method_options.parse_ints(name, text) for name, text in (("--budget", budget), ("--margin", margin))
    )
    with options.settings_checked():
        settings = QualitySettings(
            make_variants(budgets, margins, method_options.split_commas(selector)),
            prompting.max_tokens,
            prompting.ignore_eos,
            tuple(method_options.split_commas(kv_dtype or "")),
            given,
            temperature,
        )
        cut = Settings(max_tokens=settings.max_tokens, contexts=(context,), raw=prompting.raw, asked=prompting.asked)
    output.check_writable()
    samples = prompting.read()
    rouge_l()  # missing, it is missed before anything is loaded
    with console.status() as status:
        loaded = loading.load(status)
        status("Encoding")
        prompts = {f"{i}. {p.sample.origin}": p for i, p in enumerate(encode_prompts(samples, loaded, cut), 1)}
        with options.settings_checked():
            hosted = QualityBench(loaded, settings)
        for note in hosted.notes_on_short_prompts([len(p.token_ids) + settings.max_tokens for p in prompts.values()]):
            console.note(note)
    tokens = [prompt.token_ids for prompt in prompts.values()]
    header = unit_header("longdraft-quality", settings.header(), loaded, loading.name, tokens)
    units = {name: Unit(len(hosted.names), partial(hosted.measure, prompt)) for name, prompt in prompts.items()}
    found = unit_experiment(units, output.results, header)
    output.run(found, lambda complete: hosted.report([r["measured"] for r in found.records], complete), "prompts")
