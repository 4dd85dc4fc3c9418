"""Break-even and accepted length at each length of text: what speculation needs, and what it gets.

A round of a method takes R seconds and a plain step S, both measured behind the same text. A round emits the accepted
length, so speculation pays where that exceeds R / S: the **break-even**. It is measured on the method's own rounds,
drafting included. A second one is calculated: a verification of n rows over one of 1 row, timed behind made-up texts,
is the break-even of a draft of n - 1 tokens that costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rich.table import Table
from rich.text import Text

from longdraft.bench import charts
from longdraft.bench.acceptance import Accepted
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import circumstances, figure, median_of, ratio, table
from longdraft.model.runner import TargetRunner
from longdraft.planning import costs

ROWS = (1, 4, 8, 16)
"""Rows of the verifications behind made-up texts."""
FREE = "{} rows, free"

DEFINITIONS = (
    "accepted: mean accepted length = new tokens / target forwards, bonus tokens counted, the prefill's token not.",
    "break-even: a round's seconds / a plain step's, behind the same text: what must be accepted for the method to be "
    "as fast as plain decoding. Measured on its own rounds, medians of the prompts. Plain decoding: 1.",
    "free: calculated from forwards behind made-up texts: the break-even of a chain or tree of so many rows, root "
    "included, whose drafting takes no time.",
    "tokens/s: new tokens / decode seconds, the fastest of the runs, medians of the prompts; vs ar: over ar's.",
)


@dataclass(frozen=True)
class Floor:
    """The break-even of drafts that cost nothing, by rows of a verification."""

    length: int
    break_even: Mapping[int, float]


def floors(runner: TargetRunner, lengths: Sequence[int]) -> list[Floor]:
    """Times verifications behind made-up texts; lengths that do not fit context, memory or time are left out."""
    fitting = [n for n in sorted(lengths) if n + ROWS[-1] <= runner.context_length]
    measured = costs.measure(runner, fitting, ROWS) if fitting else None
    if measured is None:
        return []
    rows = measured.rows[1:]
    return [Floor(n, {r: measured.at(r, n) / measured.at(1, n) for r in rows}) for n in measured.lengths]


def document(
    runs: Iterable[Accepted], methods: Sequence[str], found: Sequence[Floor], notes: Sequence[str], complete: bool
) -> dict[str, Any]:
    """The report as one JSON object, with the keys that docs/figures.md defines.

    Args:
        methods: in the order of the rows. complete: no run is missing.
    """
    cells: dict[int, dict[str, list[Accepted]]] = {}
    for run in runs:
        if run.verifications:
            cells.setdefault(run.asked.length, {}).setdefault(run.asked.method, []).append(run)
    plain = {(run.asked.sample, length): run for length, own in cells.items() for run in own.get(REFERENCE, ())}
    return {
        "rows": [_row(cells[n][name], plain) for n in sorted(cells) for name in methods if name in cells[n]],
        "free": [{"length": f.length, "rows": r, "break_even": x} for f in found for r, x in f.break_even.items()],
        "notes": list(notes),
        **circumstances(),
        "complete": complete,
    }


def _row(own: Sequence[Accepted], plain: Mapping[tuple[str, int], Accepted]) -> dict[str, Any]:
    asked = own[0].asked
    accepted = sum(run.new_tokens for run in own) / sum(run.verifications for run in own)
    pairs = [(run, plain.get((run.asked.sample, run.asked.length))) for run in own]
    needed = median_of(ratio(_round(run), _round(ar)) for run, ar in pairs)
    return {
        "method": asked.method,
        "length": asked.length,
        "rope_factor": asked.rope_factor,
        "context_tokens": round(mean(run.prompt_tokens for run in own)),
        "prompts": len(own),
        "mean_accepted_length": accepted,
        "tokens_per_second": median_of(_rate(run) for run in own),
        "speedup_vs_ar": median_of(ratio(_rate(run), _rate(ar)) for run, ar in pairs),
        "break_even": needed,
        "pays": None if needed is None else accepted > needed,
    }


def _round(run: Accepted | None) -> float | None:
    """Seconds of a round."""
    return None if run is None or run.seconds is None else run.seconds / run.verifications


def _rate(run: Accepted | None) -> float | None:
    """Tokens a second."""
    return None if run is None or not run.seconds else run.new_tokens / run.seconds


def tables(report: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """A table of all lengths: accepted beside break-even, and tokens/s; and one of drafts that cost nothing."""
    lengths = {row["length"]: row["rope_factor"] for row in report["rows"]}
    heads = [f"{n:,}" + ("" if factor is None else f" x{factor:g}") for n, factor in lengths.items()]
    made, speed = table(["accepted / break-even"], heads), table(["tokens/s, vs ar"], heads)
    for name in dict.fromkeys(row["method"] for row in report["rows"]):
        own = {row["length"]: row for row in report["rows"] if row["method"] == name}
        made.add_row(Text(name), *(_needed(own.get(n)) for n in lengths))
        speed.add_row(Text(name), *(_speed(own.get(n)) for n in lengths))
    free = {(row["rows"], row["length"]): row["break_even"] for row in report["free"]}
    for rows in dict.fromkeys(rows for rows, _ in free):
        made.add_row(FREE.format(rows), *(figure(free.get((rows, n)), "/ {:.2f}") for n in lengths), style="dim")
    return [("Accepted length and break-even by tokens of text", made), ("Speed by tokens of text", speed)]


def _needed(row: Mapping[str, Any] | None) -> Text:
    if row is None:
        return Text("-")
    text = f"{figure(row['mean_accepted_length'], '{:.2f}')} / {figure(row['break_even'], '{:.2f}')}"
    return Text(text, style="green" if row["pays"] else "")


def _speed(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{figure(row['tokens_per_second'], '{:.1f}')}, {figure(row['speedup_vs_ar'], '{:.2f}x')}"


def chart(report: Mapping[str, Any]) -> Any:
    """Accepted length (lines) and break-even (``needed``) of every method over the lengths."""
    series: dict[str, list[charts.Point]] = {}
    for row in report["rows"]:
        if row["mean_accepted_length"] is not None:
            series.setdefault(row["method"], []).append(charts.Point(row["length"], row["mean_accepted_length"]))
        if row["break_even"] is not None and row["method"] != REFERENCE:
            series.setdefault(f"{row['method']}: needed", []).append(charts.Point(row["length"], row["break_even"]))
    methods = [name for name in series if not name.endswith(": needed")]
    style = charts.styles(methods, [REFERENCE] if REFERENCE in methods else [])
    for name in methods:
        style[f"{name}: needed"] = {**style[name], "linestyle": ":", "marker": "_"}
    title = "Accepted length, and what is needed to be as fast as plain decoding"
    return charts.lines(title, series, style, "text, tokens", "tokens a round", 1.0)


def doubled(first: int, last: int) -> tuple[int, ...]:
    """Lengths from ``first`` to ``last``, each twice the one before, and the last."""
    count = max(0, math.floor(math.log2(last / first))) if last >= first else -1
    return tuple(dict.fromkeys((*(first * 2**i for i in range(count + 1)), last)))
