"""Reports runs at several context lengths: the mean accepted length, and the break-even.

A round of a method (drafting and verification) takes R seconds; a step of plain decoding on the same context takes S
seconds. A round emits as many tokens as the accepted length says. So a method is faster than plain decoding if its
accepted length exceeds R / S, the **break-even**.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from statistics import mean
from typing import Any

from rich.text import Text

from longdraft.bench import charts, machine
from longdraft.bench.acceptance import AcceptanceRun, format_temperature
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import (
    ACCEPTED_DEFINITION,
    SPEED_DEFINITION,
    Report,
    acceptance_stats,
    depth_accepted,
    format_cell,
    format_figure,
    group_by,
    median_of,
    pivot,
    pluralize,
    ratio,
)
from longdraft.metrics import tokens_per_second

ACCEPTANCE_DEFINITIONS = (
    f"{ACCEPTED_DEFINITION} Trees have the methods' default shapes, without a planner.",
    "x2, x4: the target is stretched by YaRN with this factor.",
)
BREAK_EVEN_DEFINITIONS = (
    ACCEPTED_DEFINITION,
    "break-even: seconds of a round / seconds of a plain step on the same context: the accepted length at which the "
    "method is as fast as plain decoding. The median of the prompts. Plain decoding: 1.",
    f"{SPEED_DEFINITION}; the median of the runs, then of the prompts; vs ar: over ar on the same prompt, the median.",
)

Row = Mapping[str, Any]
Runs = Iterable[AcceptanceRun]


def acceptance_report(runs: Runs, methods: Sequence[str], notes: Sequence[str], complete: bool) -> Report:
    """Makes the report of ``bench acceptance``: a table for each temperature and data set, a column for each length.

    Args:
        methods: methods in the order of the rows.
        notes: remarks about texts.
    """
    runs = _with_verifications(runs)
    datasets: list[str | None] = list(dict.fromkeys(run.asked.dataset for run in runs))
    if len(datasets) > 1:  # None: all data sets together, which come first
        datasets.insert(0, None)
    temperatures = sorted({run.asked.temperature for run in runs})
    rows = []
    for temperature, dataset, length, method in product(temperatures, datasets, _lengths(runs), methods):
        key = temperature, length, method
        group = [run for run in runs if (run.asked.temperature, run.asked.length, run.asked.method) == key]
        if group := [run for run in group if dataset in (None, run.asked.dataset)]:
            accepted_lengths = [run.new_tokens / run.verifications for run in group]
            rows.append({
                **_common_entries(group), "temperature": temperature, "dataset": dataset,
                "sampling": group[0].asked.sampling if temperature else None,
                "new_tokens": sum(run.new_tokens for run in group),
                "verifications": sum(run.verifications for run in group),
                "lowest": min(accepted_lengths), "highest": max(accepted_lengths),
                "depth_accepted": depth_accepted([pair for run in group for pair in run.accepted]),
            })  # fmt: skip
    tables = []
    for group_rows in group_by(rows, "temperature", "dataset"):
        title = f"{group_rows[0]['dataset'] or 'all data sets'}, {_sampling_label(group_rows[0])}"
        table = pivot("method", group_rows, _heading, format_cell)
        # After an interrupted run some methods have fewer prompts: the footer shows the method with the most prompts.
        by_length = group_by(group_rows, "length")
        footer = [max(same_length, key=lambda row: int(row["prompts"])) for same_length in by_length]
        table.add_section()
        table.add_row("prompts", *(f"{row['prompts']}" for row in footer))
        table.add_row("prompt tokens", *(f"{row['context_tokens']:,}" for row in footer))
        tables.append((f"Mean accepted length: {title}", table))
    document = {"rows": rows, "notes": list(notes), **machine.environment(), "complete": complete}
    return Report(document, tables, list(map(Text, notes)), ACCEPTANCE_DEFINITIONS)


def break_even_report(runs: Runs, methods: Sequence[str], notes: Sequence[str], complete: bool) -> Report:
    """Makes the report of ``bench length``: a table of accepted lengths and break-evens, and a table of tokens/s. The
    arguments are those of :func:`acceptance_report`."""
    runs = _with_verifications(runs)
    ar_runs = {(run.asked.sample, run.asked.length): run for run in runs if run.asked.method == REFERENCE}
    rows = []
    for length, name in product(_lengths(runs), methods):
        if group := [run for run in runs if (run.asked.length, run.asked.method) == (length, name)]:
            pairs = [(run, ar_runs.get((run.asked.sample, length))) for run in group]  # with ar on the same prompt
            break_even = median_of(ratio(_round_seconds(run), _round_seconds(ar)) for run, ar in pairs)
            common = _common_entries(group)
            pays = None if break_even is None else common["mean_accepted_length"] > break_even
            rows.append({
                **common, "tokens_per_second": median_of(_speed(run) for run in group),
                "speedup_vs_ar": median_of(ratio(_speed(run), _speed(ar)) for run, ar in pairs),
                "break_even": break_even, "pays": pays,
            })  # fmt: skip
    pays_table = pivot("accepted / break-even", rows, _heading, _pays_cell)
    speed_table = pivot("tokens/s, vs ar", rows, _heading, _speed_cell)
    tables = [
        ("Accepted length and break-even by tokens of text", pays_table), ("Speed by tokens of text", speed_table),
    ]  # fmt: skip
    document = {"rows": rows, "notes": list(notes), **machine.environment(), "complete": complete}
    return Report(document, tables, list(map(Text, notes)), BREAK_EVEN_DEFINITIONS)


def _with_verifications(runs: Runs) -> list[AcceptanceRun]:
    """Leaves out runs without a verification: the prefill emits the first token, and the answer had no other."""
    return [run for run in runs if run.verifications]


def _lengths(runs: Sequence[AcceptanceRun]) -> list[int]:
    return sorted({run.asked.length for run in runs})


def _common_entries(runs: Sequence[AcceptanceRun]) -> dict[str, Any]:
    """Returns the entries of a row that both reports have."""
    return {
        "method": runs[0].asked.method,
        "length": runs[0].asked.length,
        "rope_factor": runs[0].asked.rope_factor,
        "context_tokens": round(mean(run.prompt_tokens for run in runs)),
        **acceptance_stats((run.new_tokens, run.verifications) for run in runs),
    }


def _round_seconds(run: AcceptanceRun | None) -> float | None:
    """Mean seconds of a round; None without a run."""
    return None if run is None else ratio(run.seconds, run.verifications)


def _speed(run: AcceptanceRun | None) -> float | None:
    """Tokens/s; None without a run."""
    return None if run is None else tokens_per_second(run.new_tokens, run.seconds or 0.0)


def _sampling_label(row: Row) -> str:
    return format_temperature(row["temperature"]) + format_figure(row["sampling"], ", {} sampling", missing="")


def _heading(row: Row) -> str:
    return f"{row['length']:,}" + format_figure(row["rope_factor"], " x{:g}", missing="")


def _pays_cell(row: Row) -> Text:
    text = f"{format_cell(row)} / {format_figure(row['break_even'], '{:.2f}')}"
    return Text(text, style="green" if row["pays"] else "")


def _speed_cell(row: Row) -> str:
    return f"{format_figure(row['tokens_per_second'], '{:.1f}')}, {format_figure(row['speedup_vs_ar'], '{:.2f}x')}"


def acceptance_chart(rows: Sequence[Row]) -> bytes:
    """Returns an SVG chart of rows of :func:`acceptance_report` at one temperature: mean accepted length, with one
    standard error, by context length. Each method has a line."""
    pooled = [row for row in rows if row["dataset"] is None] or rows
    series: dict[str, list[charts.Point]] = {}
    for row in pooled:
        point = charts.Point(row["length"], row["mean_accepted_length"], row["standard_error"] or 0.0)
        series.setdefault(row["method"], []).append(point)
    max_prompts = pluralize(max(row["prompts"] for row in pooled), "prompt")
    title = f"{_sampling_label(rows[0])}, up to {max_prompts} a length"
    return charts.plot(title, series, "context, tokens", "mean accepted length", 1.0)


def doubling_lengths(first: int, last: int) -> tuple[int, ...]:
    """Doubles ``first`` until ``last`` is reached. Returns all these lengths, and ``last`` itself."""
    doublings = max(0, math.floor(math.log2(last / first))) if last >= first else -1
    return tuple(dict.fromkeys((*(first * 2**i for i in range(doublings + 1)), last)))
