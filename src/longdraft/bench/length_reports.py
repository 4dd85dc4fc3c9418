"""The reports of runs at several lengths: accepted length, and what it must be for speculation to pay.

A round of a method takes R seconds and a plain step S, both measured behind the same text. A round emits the accepted
length, so speculation pays where that exceeds R / S: the **break-even**. It is measured on the method's own rounds,
drafting included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from statistics import mean
from typing import Any

from rich.text import Text

from longdraft.bench import charts
from longdraft.bench.acceptance import AcceptanceRun, format_temperature
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import (
    ACCEPTED_DEFINITION,
    SPEED_DEFINITION,
    Report,
    acceptance_stats,
    depth_accepted,
    environment_info,
    format_cell,
    format_figure,
    group_by,
    median_of,
    pivot,
    pluralize,
    ratio,
)
from longdraft.metrics import tokens_per_second

DEFINITIONS = (
    f"{ACCEPTED_DEFINITION} Trees are the methods' own, without a planner.",
    "x2, x4: the target is stretched by YaRN with this factor.",
)
BREAK_EVEN = (
    ACCEPTED_DEFINITION,
    "break-even: a round's seconds / a plain step's, behind the same text: what must be accepted for the method to be "
    "as fast as plain decoding. Measured on its own rounds, medians of the prompts. Plain decoding: 1.",
    f"{SPEED_DEFINITION}; the median of the runs, then of the prompts; vs ar: a prompt's over ar's, the median.",
)

Row = Mapping[str, Any]


def acceptance_report(
    runs: Iterable[AcceptanceRun], methods: Sequence[str], notes: Sequence[str], complete: bool
) -> Report:
    """The report of ``bench acceptance``: tables of a temperature and data set each, with a column for each length.

    Args:
        methods: in the order of the rows. notes: remarks about texts. complete: no run is missing.
    """
    runs = _decoded(runs)
    datasets: list[str | None] = list(dict.fromkeys(run.asked.dataset for run in runs))
    if len(datasets) > 1:  # all data sets together come first
        datasets.insert(0, None)
    cells = product(sorted({run.asked.temperature for run in runs}), datasets, _lengths(runs), methods)
    rows = []
    for t, dataset, length, name in cells:
        own = [r for r in runs if (r.asked.temperature, r.asked.length, r.asked.method) == (t, length, name)]
        if own := [run for run in own if dataset in (None, run.asked.dataset)]:
            each = [run.new_tokens / run.verifications for run in own]
            rows.append(
                {
                    **_shared(own),
                    "temperature": t,
                    "dataset": dataset,
                    "sampling": own[0].asked.sampling if t else None,
                    "new_tokens": sum(run.new_tokens for run in own),
                    "verifications": sum(run.verifications for run in own),
                    "lowest": min(each),
                    "highest": max(each),
                    "depth_accepted": depth_accepted([pair for run in own for pair in run.accepted]),
                }
            )
    tables = []
    for alike in group_by(rows, "temperature", "dataset"):
        about = f"{alike[0]['dataset'] or 'all data sets'}, {_sampled(alike[0])}"
        made = pivot("method", alike, _head, format_cell)
        # After a run that was stopped, some methods have more prompts than others.
        most = [max(same, key=lambda row: int(row["prompts"])) for same in group_by(alike, "length")]
        made.add_section()
        made.add_row("prompts", *(f"{row['prompts']}" for row in most))
        made.add_row("prompt tokens", *(f"{row['context_tokens']:,}" for row in most))
        tables.append((f"Mean accepted length: {about}", made))
    document = {"rows": rows, "notes": list(notes), **environment_info(), "complete": complete}
    return Report(document, tables, list(map(Text, notes)), DEFINITIONS)


def break_even_report(
    runs: Iterable[AcceptanceRun], methods: Sequence[str], notes: Sequence[str], complete: bool
) -> Report:
    """The report of ``bench length``: a table of accepted length beside break-even at all lengths, and one of tokens/s.
    Arguments as of :func:`acceptance_report`."""
    runs = _decoded(runs)
    plain = {(run.asked.sample, run.asked.length): run for run in runs if run.asked.method == REFERENCE}
    rows = []
    for length, name in product(_lengths(runs), methods):
        if own := [run for run in runs if (run.asked.length, run.asked.method) == (length, name)]:
            pairs = [(run, plain.get((run.asked.sample, length))) for run in own]
            needed, shared = median_of(ratio(_round(run), _round(ar)) for run, ar in pairs), _shared(own)
            rows.append(
                {
                    **shared,
                    "tokens_per_second": median_of(_rate(run) for run in own),
                    "speedup_vs_ar": median_of(ratio(_rate(run), _rate(ar)) for run, ar in pairs),
                    "break_even": needed,
                    "pays": None if needed is None else shared["mean_accepted_length"] > needed,
                }
            )
    tables = [
        ("Accepted length and break-even by tokens of text", pivot("accepted / break-even", rows, _head, _needed)),
        ("Speed by tokens of text", pivot("tokens/s, vs ar", rows, _head, _speed)),
    ]
    document = {"rows": rows, "notes": list(notes), **environment_info(), "complete": complete}
    return Report(document, tables, list(map(Text, notes)), BREAK_EVEN)


def _decoded(runs: Iterable[AcceptanceRun]) -> list[AcceptanceRun]:
    """Without answers of one token, which came of reading the prompt."""
    return [run for run in runs if run.verifications]


def _lengths(runs: Sequence[AcceptanceRun]) -> list[int]:
    return sorted({run.asked.length for run in runs})


def _shared(own: Sequence[AcceptanceRun]) -> dict[str, Any]:
    """The keys that the rows of both reports have."""
    return {
        "method": own[0].asked.method,
        "length": own[0].asked.length,
        "rope_factor": own[0].asked.rope_factor,
        "context_tokens": round(mean(run.prompt_tokens for run in own)),
        **acceptance_stats((run.new_tokens, run.verifications) for run in own),
    }


def _round(run: AcceptanceRun | None) -> float | None:
    """Seconds of a round."""
    return None if run is None else ratio(run.seconds, run.verifications)


def _rate(run: AcceptanceRun | None) -> float | None:
    return None if run is None else tokens_per_second(run.new_tokens, run.seconds or 0.0)


def _sampled(row: Row) -> str:
    return format_temperature(row["temperature"]) + format_figure(row["sampling"], ", {} sampling", missing="")


def _head(row: Row) -> str:
    return f"{row['length']:,}" + format_figure(row["rope_factor"], " x{:g}", missing="")


def _needed(row: Row) -> Text:
    text = f"{format_cell(row)} / {format_figure(row['break_even'], '{:.2f}')}"
    return Text(text, style="green" if row["pays"] else "")


def _speed(row: Row) -> str:
    return f"{format_figure(row['tokens_per_second'], '{:.1f}')}, {format_figure(row['speedup_vs_ar'], '{:.2f}x')}"


def acceptance_chart(rows: Sequence[Row]) -> bytes:
    """An SVG file of rows of :func:`acceptance_report` at one temperature: mean accepted length ± one standard error of every
    method over the lengths."""
    together = [row for row in rows if row["dataset"] is None] or rows
    series: dict[str, list[charts.Point]] = {}
    for row in together:
        point = charts.Point(row["length"], row["mean_accepted_length"], row["standard_error"] or 0.0)
        series.setdefault(row["method"], []).append(point)
    most = pluralize(max(row["prompts"] for row in together), "prompt")
    title = f"{_sampled(rows[0])}, up to {most} a length"
    return charts.draw_lines(title, series, "context, tokens", "mean accepted length", 1.0)


def doubling_lengths(first: int, last: int) -> tuple[int, ...]:
    """Lengths from ``first`` to ``last``, each twice the one before, and the last."""
    times = max(0, math.floor(math.log2(last / first))) if last >= first else -1
    return tuple(dict.fromkeys((*(first * 2**i for i in range(times + 1)), last)))
