"""``longdraft bench gamma``: how many tokens to draft, by the closed form and by decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longdraft.bench import tasks
from longdraft.bench.gamma import Gamma, check, medians, summary
from longdraft.bench.prompts import prepare
from longdraft.bench.settings import Settings
from longdraft.bench.tables import circumstances, figure, table
from longdraft.cli import console, method_options, options
from longdraft.cli.progress import Runs

DEFINITIONS = (
    "gamma: drafted tokens of a round. over ar: tokens/s over plain decoding's on the same prompt, one run each.",
    "closed form: (1 - alpha^(gamma + 1)) / (1 - alpha) / (gamma T_D + T_V(gamma)), T in plain steps; alpha and T_D "
    "are those of one chain's rounds (--reference), T_V the measured costs of verifications.",
    "alpha: share of drafted tokens that were right, of those whose predecessors were. best 0: plain decoding.",
)


def gamma(
    *,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="JSONL, or a data set by name, as for bench; repeatable.", show_default="as bench"),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods that draft chains, with commas between; options of one behind colons.")
    ] = "quantspec,magicdec",
    gammas: Annotated[str, typer.Option(help="Lengths of chains, with commas between.")] = "1,2,3,4,6,8",
    reference: Annotated[int, typer.Option(help="The length whose rounds the prediction is made from.")] = 4,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each file.", show_default="all")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="New tokens.")] = 64,
    context: Annotated[
        int | None, typer.Option(help="Cut the documents so that prompts have at most this many tokens.")
    ] = None,
    snapshots: Annotated[Path | None, typer.Option(help="Keep the KV of prompts in this folder, as for bench.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are; no chat template.")] = False,
    loading: options.ModelOptions,
    output: options.Output,
) -> None:
    """Compare MagicDec's closed form for the number of drafted tokens with what decoding does."""
    names = tuple(method_options.words(methods))
    with options.settings_checked():
        settings = Settings(
            names, max_tokens, (context,), raw=raw, cold=False, own_options=method_options.contender_options(names),
            snapshots=snapshots,
        )  # fmt: skip
        lengths = method_options.whole_numbers("--gammas", gammas)
        check(lengths, reference)
    samples = tasks.read(data or [tasks.BUILT_IN], limit)
    with console.status() as status:
        loaded = loading.load(status)
        prompts = prepare(samples, loaded, settings)
        status("Measuring what verifications cost")
        with options.settings_checked():
            measuring = Gamma(loaded, settings, lengths, reference)
    with Runs(len(prompts) * len(measuring.names)) as runs:
        found = [one for prompt in prompts for one in measuring.measure(prompt, runs.told(prompt.sample.origin))]
    speeds = table(["method"], ["gamma", "over ar", "closed form", "accepted"])
    for name, length, measured, predicted, accepted in medians(found):
        speeds.add_row(name, str(length), f"{measured:.2f}x", f"{predicted:.2f}x", figure(accepted, "{:.2f}"))
    rows = summary(found)
    bests = table(["method", "sample"], ["tokens", "alpha", "T_D / T_T", "best by closed form", "best"])
    for row in rows:
        bests.add_row(
            row["method"], row["sample"], f"{row['prompt_tokens']:,}", f"{row['alpha']:.2f}",
            f"{row['draft_steps']:.2f}", str(row["predicted_best"]), str(row["measured_best"]),
        )  # fmt: skip
    console.report([("medians of the prompts", speeds), ("each prompt", bests)], definitions=DEFINITIONS)
    output.json({"rows": rows, **circumstances()})
