"""The report of runs at several lengths: JSON rows, tables and charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from longdraft.bench import charts
from longdraft.bench.tables import circumstances, count, depth_accepted, figure, table

if TYPE_CHECKING:
    from longdraft.bench.acceptance import Accepted

DEFINITIONS = (
    "accepted: mean accepted length = new tokens / target forwards of all prompts together, bonus tokens counted, the "
    "prefill's token not. Trees are the methods' own, without a planner.",
    "±: one standard error over prompts (jackknife). x2, x4: the target is stretched by YaRN with this factor.",
)
DEPTHS = "by depth: of all verifications, the share that accepted d drafted tokens or more."


def document(runs: Iterable[Accepted], methods: Sequence[str], notes: Sequence[str], complete: bool) -> dict[str, Any]:
    """The report as one JSON object, with the keys that docs/figures.md defines.

    Args:
        methods: in the order of the rows.
        notes: remarks about texts.
        complete: no run is missing.
    """
    cells: dict[tuple[float, str | None, int], dict[str, list[Accepted]]] = {}
    decoded = [run for run in runs if run.verifications]  # an answer of one token came of reading the prompt
    datasets = list(dict.fromkeys(run.asked.dataset for run in decoded))
    for run in decoded:
        asked = run.asked
        for dataset in [asked.dataset, *([None] * (len(datasets) > 1))]:
            cells.setdefault((asked.temperature, dataset, asked.length), {}).setdefault(asked.method, []).append(run)
    # All data sets together come first, then one after the other; in each, the lengths.
    order = sorted(cells, key=lambda key: (key[0], -1 if key[1] is None else datasets.index(key[1]), key[2]))
    return {
        "rows": [_row(key[1], cells[key][name]) for key in order for name in methods if name in cells[key]],
        "notes": list(notes),
        **circumstances(),
        "complete": complete,
    }


def _row(dataset: str | None, runs: Sequence[Accepted]) -> dict[str, Any]:
    asked = runs[0].asked
    each = [run.new_tokens / run.verifications for run in runs]
    return {
        "method": asked.method,
        "temperature": asked.temperature,
        "dataset": dataset,
        "length": asked.length,
        "rope_factor": asked.rope_factor,
        "context_tokens": round(mean(run.prompt_tokens for run in runs)),
        "prompts": len(runs),
        "new_tokens": sum(run.new_tokens for run in runs),
        "verifications": sum(run.verifications for run in runs),
        "mean_accepted_length": _ratio(runs),
        "standard_error": _standard_error(runs),
        "lowest": min(each),
        "highest": max(each),
        "depth_accepted": depth_accepted([pair for run in runs for pair in run.accepted]),
    }


def _ratio(runs: Sequence[Accepted]) -> float:
    return sum(run.new_tokens for run in runs) / sum(run.verifications for run in runs)


def _standard_error(runs: Sequence[Accepted]) -> float | None:
    """Jackknife standard error of the ratio of two sums over prompts: each prompt is left out in turn."""
    n = len(runs)
    if n < 2:
        return None
    without = [_ratio([*runs[:i], *runs[i + 1 :]]) for i in range(n)]
    return math.sqrt((n - 1) / n * sum((x - mean(without)) ** 2 for x in without))


def tables(report: Mapping[str, Any], levels: int = 0) -> list[tuple[str, Table]]:
    """A title and a table for each temperature and data set, with a column for each length.

    Args:
        levels: how many depths to show the accepted share of, in tables of their own.
    """
    groups: dict[tuple[float, str | None], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault((row["temperature"], row["dataset"]), []).append(row)
    found = []
    for (temperature, dataset), rows in groups.items():
        about = f"{dataset or 'all data sets'}, {called(temperature)}"
        found.append((f"Mean accepted length: {about}", _lengths(rows)))
        if levels:
            found.append((f"Accepted by depth: {about}", _depths(rows, levels)))
    return found


def _lengths(rows: Sequence[Mapping[str, Any]]) -> Table:
    lengths = {row["length"]: row["rope_factor"] for row in rows}
    heads = [f"{n:,}" + ("" if factor is None else f" x{factor:g}") for n, factor in lengths.items()]
    made = table(["method"], heads)
    for name in dict.fromkeys(row["method"] for row in rows):
        own = {row["length"]: row for row in rows if row["method"] == name}
        made.add_row(Text(name), *(_cell(own.get(n)) for n in lengths))
    # After a run that was stopped, some methods have more prompts than others.
    most = [max((row for row in rows if row["length"] == n), key=lambda row: row["prompts"]) for n in lengths]
    made.add_section()
    made.add_row("prompts", *(f"{row['prompts']}" for row in most))
    made.add_row("prompt tokens", *(f"{row['context_tokens']:,}" for row in most))
    return made


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['mean_accepted_length']:.2f}" + figure(row["standard_error"], " ± {:.2f}", missing="")


def _depths(rows: Sequence[Mapping[str, Any]], levels: int) -> Table:
    made = table(["method"], ["length", *(f"{d}" for d in range(1, levels + 1))])
    for row in rows:
        shares = [f"{share:.2f}" for share in row["depth_accepted"][:levels]]
        made.add_row(Text(row["method"]), f"{row['length']:,}", *shares, *(["0.00"] * (levels - len(shares))))
    return made


def called(temperature: float) -> str:
    """A temperature in words."""
    return f"T = {temperature:g}" if temperature else "greedy"


def figures(report: Mapping[str, Any]) -> dict[float, Any]:
    """A chart for each temperature: mean accepted length ± one standard error of every method over the lengths."""
    rows = [row for row in report["rows"] if row["dataset"] is None] or report["rows"]
    style = charts.styles(list(dict.fromkeys(row["method"] for row in rows)))
    found: dict[float, Any] = {}
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        own = [row for row in rows if row["temperature"] == temperature]
        series: dict[str, list[charts.Point]] = {}
        for row in own:
            value, error = row["mean_accepted_length"], row["standard_error"] or 0.0
            point = charts.Point(row["length"], value, value - error, value + error)
            series.setdefault(row["method"], []).append(point)
        prompts = count(max(row["prompts"] for row in own), "prompt")
        title = f"Temperature {temperature:g}, up to {prompts} a length"
        found[temperature] = charts.lines(title, series, style, "context, tokens", "mean accepted length", 1.0)
    return found
