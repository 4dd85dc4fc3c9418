"""Shows the metrics of a run (speed, accepted length, memory), as JSON and as text; docs/figures.md defines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

import longdraft
from longdraft.bench.tables import new_table, ratio
from longdraft.memory.memory_info import format_bytes

if TYPE_CHECKING:
    from longdraft.bench.ties import Difference

ACCEPTED_NOTE = "mean accepted length: new tokens / target forwards, without the prefill's token; plain decoding: 1.0"

DRAFTED_STYLE = "green"
_RESULT_KEYS = (
    "text", "token_ids", "prompt_tokens", "new_tokens", "method", "exact", "finish_reason", "prefill_seconds",
    "decode_seconds", "tokens_per_second", "mean_accepted_length", "rounds", "peak_memory_bytes", "arithmetic",
)  # fmt: skip
_ENDINGS = {
    "eos": "ended by itself", "stop": "ended by a stop string", "length": "ended by --max-tokens",
    "cancelled": "cancelled",
}  # fmt: skip


def result_json(result: longdraft.Result) -> dict[str, Any]:
    """Returns the JSON object of a run, with metrics of partial verification if a round verified partially."""
    partial_keys = ("partial_rounds", "partial_tokens") if result.partial_rounds else ()
    return {name: getattr(result, name) for name in (*_RESULT_KEYS, *partial_keys)}


def footer(result: longdraft.Result, kernels: str, colored: bool) -> Group:
    """Returns the metrics that are shown below a text.

    Args:
        kernels: a line that names the kernels in use.
        colored: True if the text shows drafted tokens in colour, which the title then explains.
    """
    exactness = "exact" if result.exact else "approximate"
    title = Text(f"{result.method}, {exactness}, {result.arithmetic} arithmetic", style="bold")
    if colored and result.drafted:
        title.append("   drafted and accepted", style=DRAFTED_STYLE)
        title.append(" / written by the target", style="not bold")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    rate = f", {result.tokens_per_second:.1f} tokens/s" if result.rounds else ""
    output = f"{result.new_tokens:,} tokens in {result.decode_seconds:.2f} s{rate}; {_ENDINGS[result.finish_reason]}"
    rows = {"prompt": _describe_prefill(result), "new": output}
    if result.rounds:
        drafts = f"{result.accepted:,} of {result.drafted:,} drafted tokens were right"
        rows["accepted"] = (
            f"{result.mean_accepted_length:.2f} mean accepted length, {result.rounds:,} target forwards; "
            f"{drafts if result.drafted else 'nothing was drafted'}"
        )
    if result.partial_rounds:
        rows["partial"] = (
            f"{result.partial_rounds:,} of the forwards read a part of the cache; the {result.partial_tokens:,} tokens "
            "that they accepted were not verified on the full cache"
        )
    rows |= {"kernels": kernels, "memory": f"{format_bytes(result.peak_memory_bytes)} at peak"}
    for name, text in rows.items():
        grid.add_row(name, Text(text))
    return Group(title, grid, *([Text(ACCEPTED_NOTE, style="dim")] if result.rounds else []))


def _describe_prefill(result: longdraft.Result) -> str:
    seconds, computed = result.prefill_seconds, result.prompt_tokens - result.cached_tokens
    # Of a cached prompt only the last token is computed, which makes no rate.
    rate = f" ({computed / seconds:,.0f} tokens/s)" if seconds > 0 and computed > 1 else ""
    cached = f", {result.cached_tokens:,} of them from the KV cache" if result.cached_tokens else ""
    if result.finish_reason == "cancelled" and not result.token_ids:
        return f"{result.prompt_tokens:,} tokens{cached}; cancelled while they were read"
    return f"{result.prompt_tokens:,} tokens{cached}; {computed:,} read in {seconds:.2f} s{rate}"


def comparison_json(result: longdraft.Result, ar: longdraft.Result, difference: Difference | None) -> dict[str, Any]:
    """Returns the value of ``compare`` in the JSON object: the run with ``ar``, and how the two runs differ.

    ``speedup_vs_ar`` is None if a run decoded nothing. ``near_tie`` is None if all tokens agree. It is True if the
    logits of the first two tokens that differ are equal up to rounding.
    """
    speedup = ratio(result.tokens_per_second or None, ar.tokens_per_second)
    near_tie = None if difference is None else difference.near_tie
    return {"ar": result_json(ar), "speedup_vs_ar": speedup, "tokens_agree": difference is None, "near_tie": near_tie}


def comparison_view(
    result: longdraft.Result, ar: longdraft.Result, difference: Difference | None, decode: Callable[[list[int]], str]
) -> Group:
    """Returns a table of a run and the run with ``ar``, the speedup, and the first token that differs."""
    view = new_table(["compared"], ["tokens/s", "decode", "tokens", "forwards", "accepted"])
    for run in (result, ar):
        view.add_row(
            Text(run.method), f"{run.tokens_per_second:.1f}", f"{run.decode_seconds:.2f} s",
            f"{run.new_tokens:,}", f"{run.rounds:,}", f"{run.mean_accepted_length:.2f}",
        )  # fmt: skip
    lines, style = [], ""
    if speedup := ratio(result.tokens_per_second or None, ar.tokens_per_second):
        line = Text(f"{speedup:.2f} times the tokens/s of ar", style="bold")
        lines.append(line.append(" (one run each; `longdraft bench` measures medians)", style="not bold"))
    text = f"all {result.new_tokens:,} tokens agree with ar"
    if difference is not None:
        token_ids, gap = (difference.token, difference.reference), difference.gap
        style = "" if difference.near_tie or not result.exact else "red"
        tokens = ("the end" if token is None else repr(decode([token])) for token in token_ids)
        text = "tokens first differ at new token {}: {}, ar has {}".format(difference.position + 1, *tokens)
        if None not in token_ids:
            near_tie = f"a near tie: the logits are {gap:.1g} apart, which is rounding"
            text += f"; {near_tie if difference.near_tie else f'no near tie, the logits are {gap:.3g} apart'}"
    return Group(view, *lines, Text(text, style=style))
