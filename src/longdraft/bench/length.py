"""The report of runs at several lengths: accepted length, and what it must be for speculation to pay.

A round of a method takes R seconds and a plain step S, both measured behind the same text. A round emits the accepted
length, so speculation pays where that exceeds R / S: the **break-even**. It is measured on the method's own rounds,
drafting included. A second one is calculated: :mod:`longdraft.bench.break_even`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from rich.table import Table
from rich.text import Text

from longdraft.bench import charts
from longdraft.bench.acceptance import Accepted, called
from longdraft.bench.break_even import Free
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import (
    Report,
    circumstances,
    count,
    depth_accepted,
    figure,
    median_of,
    pivot,
    ratio,
    table,
)

ACCEPTED = (
    "accepted: mean accepted length = new tokens / target forwards of all prompts together, bonus tokens counted, the "
    "prefill's token not."
)
DEFINITIONS = (
    f"{ACCEPTED} Trees are the methods' own, without a planner.",
    "±: one standard error over prompts (jackknife). x2, x4: the target is stretched by YaRN with this factor.",
)
DEPTHS = "by depth: of all verifications, the share that accepted d drafted tokens or more."
BREAK_EVEN = (
    ACCEPTED,
    "break-even: a round's seconds / a plain step's, behind the same text: what must be accepted for the method to be "
    "as fast as plain decoding. Measured on its own rounds, medians of the prompts. Plain decoding: 1.",
    "free: calculated from forwards behind made-up texts: the break-even of a chain or tree of so many rows, root "
    "included, whose drafting takes no time.",
    "tokens/s: new tokens / decode seconds, the fastest of the runs, medians of the prompts; vs ar: over ar's.",
)
FREE = "{} rows, free"

Row = dict[str, Any]
Cell = tuple[Any, ...]


# --- rows ---


def _rows(
    runs: Iterable[Accepted],
    methods: Sequence[str],
    cells_of: Callable[[Accepted], Sequence[Cell]],
    row: Callable[[Cell, Sequence[Accepted]], Row],
) -> list[Row]:
    """A row for each cell and method, the cells in their order.

    Args:
        cells_of: the cells that a run belongs to.
    """
    cells: dict[Cell, dict[str, list[Accepted]]] = {}
    for run in runs:
        if run.verifications != 0:  # else an answer of one token, which came of reading the prompt
            for cell in cells_of(run):
                cells.setdefault(cell, {}).setdefault(run.asked.method, []).append(run)
    return [row(cell, cells[cell][name]) for cell in sorted(cells) for name in methods if name in cells[cell]]


def _shared(own: Sequence[Accepted]) -> Row:
    """The keys that the rows of both reports have."""
    return {
        "method": own[0].asked.method,
        "length": own[0].asked.length,
        "rope_factor": own[0].asked.rope_factor,
        "context_tokens": round(mean(run.prompt_tokens for run in own)),
        "prompts": len(own),
        "mean_accepted_length": _ratio(own),
    }


def acceptance(runs: Iterable[Accepted], methods: Sequence[str], notes: Sequence[str], complete: bool) -> Row:
    """The JSON object of ``bench acceptance``, with the keys that docs/figures.md defines.

    Args:
        methods: in the order of the rows. notes: remarks about texts. complete: no run is missing.
    """
    runs = list(runs)
    datasets = list(dict.fromkeys(run.asked.dataset for run in runs if run.verifications))

    def cells_of(run: Accepted) -> list[Cell]:
        # All data sets together come first, then one after the other; in each, the lengths.
        places = [datasets.index(run.asked.dataset), *([-1] if len(datasets) > 1 else [])]
        return [(run.asked.temperature, place, run.asked.length) for place in places]

    def row(cell: Cell, own: Sequence[Accepted]) -> Row:
        each = [_ratio([run]) or 0.0 for run in own]
        temperature, place, _ = cell
        return {
            **_shared(own),
            "temperature": temperature,
            "dataset": None if place < 0 else datasets[place],
            "new_tokens": sum(run.new_tokens for run in own),
            "verifications": sum(run.verifications or 0 for run in own),
            "standard_error": _standard_error(own),
            "lowest": min(each),
            "highest": max(each),
            "depth_accepted": depth_accepted([pair for run in own for pair in run.accepted]),
        }

    rows = _rows(runs, methods, cells_of, row)
    return {"rows": rows, "notes": list(notes), **circumstances(), "complete": complete}


def _ratio(runs: Sequence[Accepted]) -> float | None:
    """Mean accepted length; None if a server does not say."""
    forwards = [run.verifications for run in runs]
    return None if None in forwards else sum(run.new_tokens for run in runs) / sum(filter(None, forwards))


def _standard_error(runs: Sequence[Accepted]) -> float | None:
    """Jackknife standard error of the ratio of two sums over prompts: each prompt is left out in turn."""
    n = len(runs)
    without = [_ratio([*runs[:i], *runs[i + 1 :]]) or 0.0 for i in range(n)] if n > 1 else []
    return math.sqrt((n - 1) / n * sum((x - mean(without)) ** 2 for x in without)) if without else None


def break_even(
    runs: Iterable[Accepted], methods: Sequence[str], free: Sequence[Free], notes: Sequence[str], complete: bool
) -> Row:
    """The JSON object of ``bench length``; arguments as of :func:`acceptance`."""
    runs = list(runs)
    plain = {(run.asked.sample, run.asked.length): run for run in runs if run.asked.method == REFERENCE}

    def row(_: Cell, own: Sequence[Accepted]) -> Row:
        pairs = [(run, plain.get((run.asked.sample, run.asked.length))) for run in own]
        accepted, needed = _ratio(own), median_of(ratio(_round(run), _round(ar)) for run, ar in pairs)
        first = median_of(run.first_token_seconds for run in own)
        return {
            **_shared(own),
            "tokens_per_second": median_of(_rate(run) for run in own),
            "speedup_vs_ar": median_of(ratio(_rate(run), _rate(ar)) for run, ar in pairs),
            **({} if first is None else {"ttft_seconds": first}),
            "break_even": needed,
            "pays": None if needed is None or accepted is None else accepted > needed,
        }

    return {
        "rows": _rows(runs, methods, lambda run: [(run.asked.length,)], row),
        "free": [{"length": f.tokens, "rows": f.rows, "break_even": f.steps} for f in free],
        "notes": list(notes),
        **circumstances(),
        "complete": complete,
    }


def _round(run: Accepted | None) -> float | None:
    """Seconds of a round."""
    return None if run is None else ratio(run.seconds, run.verifications)


def _rate(run: Accepted | None) -> float | None:
    """Tokens a second."""
    return None if run is None else ratio(run.new_tokens, run.seconds)


# --- what is shown ---


def acceptance_report(found: Row, levels: int = 0) -> Report:
    """Tables of a temperature and data set each, with a column for each length; a figure for each temperature.

    Args:
        levels: how many depths to show the accepted share of, in tables of their own.
    """
    rows, tables = found["rows"], []
    for temperature, dataset in dict.fromkeys((row["temperature"], row["dataset"]) for row in rows):
        own = [row for row in rows if (row["temperature"], row["dataset"]) == (temperature, dataset)]
        about = f"{dataset or 'all data sets'}, {called(temperature)}"
        made = pivot("method", own, _head, _with_error)
        # After a run that was stopped, some methods have more prompts than others.
        lengths = dict.fromkeys(row["length"] for row in own)
        most = [max((row for row in own if row["length"] == n), key=lambda row: row["prompts"]) for n in lengths]
        made.add_section()
        made.add_row("prompts", *(f"{row['prompts']}" for row in most))
        made.add_row("prompt tokens", *(f"{row['context_tokens']:,}" for row in most))
        tables.append((f"Mean accepted length: {about}", made))
        if levels:
            tables.append((f"Accepted by depth: {about}", _by_depth(own, levels)))
    figures = {f"t{t:g}": partial(_chart, rows, t) for t in dict.fromkeys(row["temperature"] for row in rows)}
    definitions = [*DEFINITIONS, *([DEPTHS] if levels else [])]
    return Report(found, tables, list(map(Text, found["notes"])), definitions, figures, "longdraft bench acceptance")


def _head(row: Mapping[str, Any]) -> str:
    return f"{row['length']:,}" + figure(row["rope_factor"], " x{:g}", missing="")


def _with_error(row: Mapping[str, Any]) -> str:
    return f"{row['mean_accepted_length']:.2f}" + figure(row["standard_error"], " ± {:.2f}", missing="")


def _by_depth(rows: Sequence[Mapping[str, Any]], levels: int) -> Table:
    made = table(["method"], ["length", *(f"{d}" for d in range(1, levels + 1))])
    for row in rows:
        shares = [*row["depth_accepted"], *([0.0] * levels)][:levels]
        made.add_row(Text(row["method"]), f"{row['length']:,}", *(f"{share:.2f}" for share in shares))
    return made


def _chart(rows: Sequence[Mapping[str, Any]], temperature: float) -> Any:
    """Mean accepted length ± one standard error of every method over the lengths."""
    own = [row for row in rows if row["temperature"] == temperature]
    own = [row for row in own if row["dataset"] is None] or own
    series: dict[str, list[charts.Point]] = {}
    for row in own:
        value, error = row["mean_accepted_length"], row["standard_error"] or 0.0
        point = charts.Point(row["length"], value, value - error, value + error)
        series.setdefault(row["method"], []).append(point)
    title = f"Temperature {temperature:g}, up to {count(max(row['prompts'] for row in own), 'prompt')} a length"
    return charts.lines(title, series, "context, tokens", "mean accepted length", 1.0)


def break_even_report(found: Row) -> Report:
    """A table of accepted length beside break-even at all lengths, with drafts that cost nothing; one of tokens/s."""
    rows = found["rows"]
    made = pivot("accepted / break-even", rows, _head, _needed)
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    free = {(row["rows"], row["length"]): row["break_even"] for row in found["free"]}
    for count_ in dict.fromkeys(rows for rows, _ in free):
        cells = (figure(free.get((count_, n)), "/ {:.2f}") for n in lengths)
        made.add_row(FREE.format(count_), *cells, style="dim")
    tables = [("Accepted length and break-even by tokens of text", made)]
    tables.append(("Speed by tokens of text", pivot("tokens/s, vs ar", rows, _head, _speed)))
    figures = {"": partial(_needed_chart, rows)} if rows else {}
    return Report(found, tables, list(map(Text, found["notes"])), BREAK_EVEN, figures, "longdraft bench length")


def _needed(row: Mapping[str, Any]) -> Text:
    text = f"{figure(row['mean_accepted_length'], '{:.2f}')} / {figure(row['break_even'], '{:.2f}')}"
    return Text(text, style="green" if row["pays"] else "")


def _speed(row: Mapping[str, Any]) -> str:
    return f"{figure(row['tokens_per_second'], '{:.1f}')}, {figure(row['speedup_vs_ar'], '{:.2f}x')}"


def _needed_chart(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Accepted length (lines) and break-even (``needed``) of every method over the lengths."""
    series: dict[str, list[charts.Point]] = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        for called_, key in ((name, "mean_accepted_length"), (f"{name}: needed", "break_even")):
            points = [charts.Point(row["length"], row[key]) for row in rows if row["method"] == name and row[key]]
            if points and (key == "mean_accepted_length" or name != REFERENCE):
                series[called_] = points
    title = "Accepted length, and what is needed to be as fast as plain decoding"
    needed = [name for name in series if name.endswith(": needed")]
    return charts.lines(title, series, "text, tokens", "tokens a round", 1.0, [REFERENCE], needed)


def doubled(first: int, last: int) -> tuple[int, ...]:
    """Lengths from ``first`` to ``last``, each twice the one before, and the last."""
    times = max(0, math.floor(math.log2(last / first))) if last >= first else -1
    return tuple(dict.fromkeys((*(first * 2**i for i in range(times + 1)), last)))
