"""``longdraft bench quality``: what partial verification costs in quality."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer

from longdraft.bench.scores import rouge_l
from longdraft.cli import console, measuring, method_options, options


@dataclass(frozen=True, kw_only=True)
class Compared(measuring.Prompts):
    """Prompts that are named."""

    data: Annotated[
        list[str], typer.Option("--data", help="JSONL, or a data set by name, as for bench; repeatable.")
    ] = field()
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens at most.")] = 128


def quality(
    *,
    prompting: Compared,
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
    output: measuring.Rendered,
) -> None:
    """Measure the quality of specpv and of a rounded KV: likeness of texts (ROUGE-L), the target's nats, scores."""
    from longdraft.bench.experiment import Unit, of_units
    from longdraft.bench.prompts import prepare
    from longdraft.bench.quality import METHOD, Quality, QualitySettings, variants
    from longdraft.bench.results import header_of_units
    from longdraft.bench.settings import Settings

    given = method_options.method_options(METHOD, option or []) | drafting.options()
    given |= {} if drafter is None else {"drafter": drafter}
    budgets, margins = (
        method_options.whole_numbers(name, text) for name, text in (("--budget", budget), ("--margin", margin))
    )
    with options.settings_checked():
        settings = QualitySettings(
            variants(budgets, margins, method_options.words(selector)),
            prompting.max_tokens,
            prompting.ignore_eos,
            tuple(method_options.words(kv_dtype or "")),
            given,
            temperature,
        )
        cut = Settings(max_tokens=settings.max_tokens, contexts=(context,), raw=prompting.raw, asked=prompting.asked)
    output.check()
    samples = prompting.read()
    rouge_l()  # missing, it is missed before anything is loaded
    with console.status() as status:
        loaded = loading.load(status)
        status("Encoding")
        prompts = {f"{i}. {p.sample.origin}": p for i, p in enumerate(prepare(samples, loaded, cut), 1)}
        with options.settings_checked():
            hosted = Quality(loaded, settings)
        for note in hosted.uncut([len(p.tokens) + settings.max_tokens for p in prompts.values()]):
            console.note(note)
    tokens = [prompt.tokens for prompt in prompts.values()]
    header = header_of_units("longdraft-quality", settings.header(), loaded, loading.name, tokens)
    units = {name: Unit(len(hosted.names), partial(hosted.measure, prompt)) for name, prompt in prompts.items()}
    found = of_units(units, output.results, header)
    output.measure(found, lambda complete: hosted.report([r["measured"] for r in found.found], complete), "prompts")
