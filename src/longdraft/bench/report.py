"""The report of ``bench``: its JSON object, tables and remarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from longdraft.bench.peers import HF
from longdraft.bench.run import BatchResult
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
    mean_of,
    median_of,
    new_table,
    nonempty_columns,
    pluralize,
    ratio,
    spread,
)

DEFINITIONS = (
    f"{SPEED_DEFINITION}; the median of the timed runs, then of the samples.",
    "speed-up: a sample's tokens/s over that of ar, or of transformers' generate (hf), on the same sample; the median.",
    "faster, slower: samples (batches) with a speed-up over ar above 1.02, and below 0.98.",
    ACCEPTED_DEFINITION,
    "score: answers of the first timed run against references (docs/figures.md); the mean of the samples.",
    "first token: seconds from the start of a prefill without cached KV to the first token; the median.",
    "view: KV entries of a longer context that a draft, and in specpv a partial verification, sees: first entries + "
    "chunks x entries of each + last entries.",
    "differ: samples whose tokens are not those of ar. A near tie is no mismatch: the two tokens' logits are at most "
    "64 (float32) or 4 (bfloat16, float16) ulps of the dtype apart, an order that rounding may change.",
)

PROFILE_DEFINITIONS = (
    "a round: draft: the drafter. verify: the model's forward over the drafted tokens, in two parts: attention, and "
    "the rest, whose time does not depend on the context. overhead: everything else, such as sampling. prefix: the "
    "context's share of the keys that attention read.",
)
PARTS = {"attention": "verify: attention", "forward": "verify: the rest", "rest": "overhead"}

# (heading, key of the row, format)
VIEW = ("view", "view", "{}")
COLUMNS = (
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("vs ar", "speedup_vs_ar", "{:.2f}x"),
    ("faster", "faster_than_ar", "{}"),
    ("slower", "slower_than_ar", "{}"),
    ("vs hf", "speedup_vs_hf", "{:.2f}x"),
    ("accepted", "mean_accepted_length", "{:.2f}"),
    ("rolled back", "rolled_back", "{:.1%}"),
    ("score", "score", "{:.3f}"),
    ("first token", "ttft_seconds", "{:.2f} s"),
    VIEW,
)
_COUNT_KEYS = ("faster_than_ar", "slower_than_ar")
# A speed-up within 2 % of 1 is neither a win nor a loss: the same method run twice differs by as much.
TOLERANCE = 0.02


def rows(names: Sequence[str], measured: Sequence[BatchResult]) -> list[dict[str, Any]]:
    """A row for each contender in ``names``, data set, context and batch size. Keys: docs/figures.md."""
    groups: dict[tuple[str, int | None, int], list[BatchResult]] = {}
    for m in measured:
        groups.setdefault((m.dataset, m.context, m.batch), []).append(m)
    return [_row(name, group, names) for group in groups.values() for name in names]


def _row(name: str, measured: Sequence[BatchResult], names: Sequence[str]) -> dict[str, Any]:
    """The row of a contender over batches of one data set, context and size; ``names``: all contenders."""
    first = measured[0]
    differences = [d for m in measured for d in m.differences if d.method == name]
    comparable = all(name in m.comparable for m in measured)
    near_ties = sum(d.near_tie for d in differences)
    runs = [run for m in measured for run in m.rounds[name]]
    peaks = [peak for m in measured if (peak := m.peak_memory_bytes.get(name)) is not None]
    over_ar = speedups_over(measured, name, REFERENCE)
    speedups = [] if name == REFERENCE else over_ar
    # Tokens/s of the method and of ar: for each repeat, a tuple over the batches.
    rates, ar_rates = (
        list(zip(*([run.tokens_per_second for run in m.rounds[contender]] for m in measured), strict=False))
        for contender in (name, REFERENCE)
    )
    row = {
        "method": name,
        "dataset": first.dataset,
        "context_tokens": round(median(n for m in measured for n in m.prompt_tokens)),
        "batch": first.batch,
        "samples": sum(m.batch for m in measured),
        "tokens_per_second": median_of(m.tokens_per_second(name) for m in measured),
        "speedup_vs_ar": median_of(over_ar),
        "speedup_vs_hf": median_of(speedups_over(measured, name, HF)) if HF in names else None,
        **acceptance_stats(pair for m in measured for pair in m.counts(name)),
        "ttft_seconds": median_of(m.cold[name].first_token_seconds for m in measured if name in m.cold),
        "mismatches": len(differences) - near_ties if comparable else None,
        "near_ties": near_ties if comparable else None,
        "context": first.context,
        "tokens_per_second_spread": spread(map(median_of, rates)),
        "speedup_vs_ar_spread": spread(median_of(map(ratio, *pair)) for pair in zip(rates, ar_rates, strict=False)),
        "speedup_vs_ar_range": spread(speedups),
        "faster_than_ar": sum(x > 1 + TOLERANCE for x in speedups) if speedups else None,
        "slower_than_ar": sum(x < 1 - TOLERANCE for x in speedups) if speedups else None,
        "depth_accepted": depth_accepted([pair for run in runs for pair in run.accepted]),
        "peak_memory_bytes": max(peaks, default=None),
        "view": next((run.view for run in runs if run.view), None),
        "scored": first.scored or None,
        "score": mean_of(score for m in measured for score in m.scores.get(name, ())),
    }
    if partial_tokens := sum(run.partial_tokens for run in runs):
        row["rolled_back"] = sum(run.rolled_back for run in runs) / partial_tokens
    if profiles := [m.profiles[name] for m in measured if name in m.profiles]:
        row["profile"] = _mean_profile(profiles)
    return row


def _mean_profile(profiles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean seconds of a round by part, and the mean share of the prefix in the keys that were read."""
    return {
        "seconds": {part: mean_of(p["seconds"].get(part) for p in profiles) for part in profiles[0]["seconds"]},
        "prefix_share": mean_of(p["prefix_share"] for p in profiles),
    }


def speedups_over(measured: Sequence[BatchResult], name: str, reference: str) -> list[float]:
    """For each batch that both contenders decoded: the method's tokens/s over the reference's."""
    common = [m for m in measured if name in m.rounds and reference in m.rounds]
    ratios = [ratio(m.tokens_per_second(name), m.tokens_per_second(reference)) for m in common]
    return [x for x in ratios if x is not None]


def document(
    names: Sequence[str], measured: Sequence[BatchResult], notes: Mapping[str, str] | None = None, complete: bool = True
) -> dict[str, Any]:
    """The report as one JSON object.

    Args:
        notes: remarks about contenders, by name.
        complete: True if no batch is missing.
    """
    return {
        "rows": rows(names, measured),
        **environment_info(),
        "differences": [asdict(d) | {"context": m.context} for m in measured for d in m.differences],
        "notes": dict(notes or {}),
        "complete": complete,
    }


def make_report(document: dict[str, Any], decode: Callable[[list[int]], str] = str) -> Report:
    """The report of a :func:`document`: a table for each data set, context and batch, and a table of a round's parts if
    methods were profiled.

    Args:
        decode: token ids -> text.
    """
    rows = document["rows"]
    one_batch = all(row["samples"] == row["batch"] for row in rows)  # then there are no wins and losses to count
    columns = nonempty_columns(rows, [column for column in COLUMNS if not (one_batch and column[1] in _COUNT_KEYS)])
    figures = [column for column in columns if column != VIEW]
    tables: list[tuple[str, Table]] = []
    for group in group_by(rows, "dataset", "context", "batch"):
        table = new_table(["method"], [heading for heading, *_ in figures])
        table.add_column("differ")
        if VIEW in columns:  # text, which may be wrapped
            table.add_column(VIEW[0])
        for row in group:
            cells = (format_cell(row, key, form) for _, key, form in figures)
            views = [format_figure(row["view"], "{}")] if VIEW in columns else []
            table.add_row(Text(row["method"]), *cells, _difference_cell(row), *views)
        tables.append((_title(group[0]), table))
        if any("profile" in row for row in group):
            tables.append((f"{_title(group[0])}: a round", _profile_table(group)))
    remarks = _difference_lines(document, decode)
    for note in dict.fromkeys(document["notes"].values()):
        remarks.append(Text(f"{', '.join(name for name, n in document['notes'].items() if n == note)}: {note}."))
    definitions = (*DEFINITIONS, *(PROFILE_DEFINITIONS if any("profile" in row for row in rows) else ()))
    return Report(document, tables, remarks, definitions)


def _title(row: Mapping[str, Any]) -> str:
    samples = pluralize(row["samples"], "sample")
    batch = f", {row['batch']} at a time" if row["batch"] > 1 else ""
    return f"{row['dataset']}: {samples}{batch}, {row['context_tokens']:,} prompt tokens"


def _difference_cell(row: Mapping[str, Any]) -> Text:
    if row["mismatches"] is None:
        return Text("not comparable")
    ties = pluralize(row["near_ties"], "near tie")
    if row["mismatches"]:
        text = f"{row['mismatches']} mismatch" + ("es" if row["mismatches"] > 1 else "")
        return Text(text + (f", {ties}" if row["near_ties"] else ""), style="red")
    return Text(ties if row["near_ties"] else "none")


def _profile_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of the milliseconds of a round's parts, for the methods that were profiled."""
    profiles = {row["method"]: row["profile"] for row in rows if "profile" in row}
    parts = dict.fromkeys(part for profile in profiles.values() for part in profile["seconds"])
    table = new_table(["method"], [*(PARTS.get(part, part) for part in parts), "prefix"])
    for name, profile in profiles.items():
        seconds = (f"{1000 * (profile['seconds'].get(part) or 0):.2f} ms" for part in parts)
        table.add_row(Text(name), *seconds, format_figure(profile["prefix_share"], "{:.0%}"))
    return table


def _difference_lines(report: dict[str, Any], decode: Callable[[list[int]], str]) -> list[Text]:
    """A line for each sample whose tokens are not those of ``ar``."""
    lines = []
    for d in report["differences"]:
        kind = "near tie" if d["near_tie"] else "MISMATCH"
        token, ar = (
            "the end" if d[key] is None else f"{decode([d[key]])!r} ({d[key]})" for key in ("token", "reference")
        )
        gap = "" if d["gap"] is None else f", logits {d['gap']:.2g} apart"
        text = f"{kind}: {d['method']} on {d['sample']}, new token {d['position'] + 1}: {token}, ar has {ar}{gap}"
        lines.append(Text(text, style="" if d["near_tie"] else "red"))
    return lines
