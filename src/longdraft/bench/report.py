"""Makes the report of ``bench``: a JSON object, tables and remarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from longdraft.bench import machine
from longdraft.bench.peers import HF
from longdraft.bench.run import BatchResult
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
    "a round: draft: drafting. update: the draft's cache is updated. verify: the model's forward over the drafted "
    "tokens, in two parts: attention, and the rest, whose time does not depend on the context. overhead: everything "
    "else, such as sampling. prefix: the context's share of the keys that attention read.",
)
# By part of a round (see longdraft.bench.profile.PARTS): the heading of its column; other parts keep their name.
PART_HEADINGS = {"attention": "verify: attention", "forward": "verify: the rest", "rest": "overhead"}

# (heading, key of the figure in a row, format)
VIEW = ("view", "view", "{}")
COLUMNS = (
    ("tokens/s", "tokens_per_second", "{:.1f}"), ("vs ar", "speedup_vs_ar", "{:.2f}x"),
    ("faster", "faster_than_ar", "{}"), ("slower", "slower_than_ar", "{}"), ("vs hf", "speedup_vs_hf", "{:.2f}x"),
    ("accepted", "mean_accepted_length", "{:.2f}"),
    ("score", "score", "{:.3f}"), ("first token", "ttft_seconds", "{:.2f} s"), VIEW,
)  # fmt: skip
_COUNT_KEYS = ("faster_than_ar", "slower_than_ar")
# A speed-up of less than 2 % counts neither as faster nor as slower: two runs of one method differ by as much.
TOLERANCE = 0.02


def rows(names: Sequence[str], measured: Sequence[BatchResult]) -> list[dict[str, Any]]:
    """Makes a row for each contender in ``names``, data set, context and batch size. docs/figures.md lists the keys."""
    groups: dict[tuple[str, int | None, int], list[BatchResult]] = {}
    for result in measured:
        groups.setdefault((result.dataset, result.context, result.batch), []).append(result)
    return [_row(name, group, names) for group in groups.values() for name in names]


def _row(name: str, measured: Sequence[BatchResult], names: Sequence[str]) -> dict[str, Any]:
    """Makes the row of a contender over batches of one data set, context and size. ``names``: all contenders."""
    first = measured[0]
    differences = [diff for result in measured for diff in result.differences if diff.method == name]
    comparable = all(name in result.comparable for result in measured)
    near_ties = sum(diff.near_tie for diff in differences)
    runs = [run for result in measured for run in result.rounds[name]]
    peaks = [peak for result in measured if (peak := result.peak_memory_bytes.get(name)) is not None]
    speedups = speedups_over(measured, name, REFERENCE)
    compared_speedups = [] if name == REFERENCE else speedups  # ar has no wins, losses and range over itself
    # Tokens/s of the contender and of ar: for each repeat, a tuple over the batches.
    speeds, ar_speeds = (
        list(zip(*([run.tokens_per_second for run in result.rounds[contender]] for result in measured), strict=False))
        for contender in (name, REFERENCE)
    )
    row = {
        "method": name,
        "dataset": first.dataset,
        "context_tokens": round(median(length for result in measured for length in result.prompt_tokens)),
        "batch": first.batch,
        "samples": sum(result.batch for result in measured),
        "tokens_per_second": median_of(result.tokens_per_second(name) for result in measured),
        "speedup_vs_ar": median_of(speedups),
        "speedup_vs_hf": median_of(speedups_over(measured, name, HF)) if HF in names else None,
        **acceptance_stats(counts for result in measured for counts in result.token_counts(name)),
        "ttft_seconds": median_of(result.cold[name].first_token_seconds for result in measured if name in result.cold),
        "mismatches": len(differences) - near_ties if comparable else None,
        "near_ties": near_ties if comparable else None,
        "context": first.context,
        "tokens_per_second_spread": spread(map(median_of, speeds)),
        "speedup_vs_ar_spread": spread(median_of(map(ratio, *pair)) for pair in zip(speeds, ar_speeds, strict=False)),
        "speedup_vs_ar_range": spread(compared_speedups),
        "faster_than_ar": sum(x > 1 + TOLERANCE for x in compared_speedups) if compared_speedups else None,
        "slower_than_ar": sum(x < 1 - TOLERANCE for x in compared_speedups) if compared_speedups else None,
        "depth_accepted": depth_accepted([pair for run in runs for pair in run.accepted]),
        "peak_memory_bytes": max(peaks, default=None),
        "view": next((run.view for run in runs if run.view), None),
        "scored": first.scored or None,
        "score": mean_of(score for result in measured for score in result.scores.get(name, ())),
    }
    if profiles := [result.profiles[name] for result in measured if name in result.profiles]:
        row["profile"] = _mean_profile(profiles)
    return row


def _mean_profile(profiles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Averages profiles: seconds of each part of a round, and the share of the prefix in the keys that were read."""
    return {
        "seconds": {part: mean_of(p["seconds"].get(part) for p in profiles) for part in profiles[0]["seconds"]},
        "prefix_share": mean_of(p["prefix_share"] for p in profiles),
    }


def speedups_over(measured: Sequence[BatchResult], name: str, reference: str) -> list[float]:
    """Returns a contender's tokens/s over those of a reference, for each batch that both contenders decoded."""
    common = [result for result in measured if name in result.rounds and reference in result.rounds]
    speedups = [ratio(result.tokens_per_second(name), result.tokens_per_second(reference)) for result in common]
    return [speedup for speedup in speedups if speedup is not None]


def document(
    names: Sequence[str], measured: Sequence[BatchResult], notes: Mapping[str, str] | None = None, complete: bool = True
) -> dict[str, Any]:
    """Makes the report as one JSON object."""
    return {
        "rows": rows(names, measured),
        **machine.environment(),
        "differences": [
            asdict(diff) | {"context": result.context} for result in measured for diff in result.differences
        ],
        "notes": dict(notes or {}), "complete": complete,
    }  # fmt: skip


def make_report(document: dict[str, Any], decode: Callable[[list[int]], str] = str) -> Report:
    """Makes the report of a :func:`document`: a table for each data set, context and batch size. If methods were
    profiled, a table of the parts of a round follows each of these tables.

    Args:
        decode: returns the text of token ids.
    """
    rows = document["rows"]
    one_batch = all(row["samples"] == row["batch"] for row in rows)  # then faster and slower batches are not counted
    columns = nonempty_columns(rows, [column for column in COLUMNS if not (one_batch and column[1] in _COUNT_KEYS)])
    figures = [column for column in columns if column != VIEW]
    tables: list[tuple[str, Table]] = []
    for group in group_by(rows, "dataset", "context", "batch"):
        table = new_table(["method"], [heading for heading, *_ in figures])
        table.add_column("differ")
        if VIEW in columns:  # text, which may be wrapped
            table.add_column(VIEW[0])
        for row in group:
            cells = (format_cell(row, key, pattern) for _, key, pattern in figures)
            views = [format_figure(row["view"], "{}")] if VIEW in columns else []
            table.add_row(Text(row["method"]), *cells, _difference_cell(row), *views)
        tables.append((_title(group[0]), table))
        if any("profile" in row for row in group):
            tables.append((f"{_title(group[0])}: a round", _profile_table(group)))
    remarks = _difference_lines(document, decode)
    notes = document["notes"]
    for note in dict.fromkeys(notes.values()):  # names of contenders with the same note share a line
        remarks.append(Text(f"{', '.join(name for name in notes if notes[name] == note)}: {note}."))
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
    """Makes a table of the milliseconds of each part of a round, for the methods that were profiled."""
    profiles = {row["method"]: row["profile"] for row in rows if "profile" in row}
    parts = dict.fromkeys(part for profile in profiles.values() for part in profile["seconds"])
    table = new_table(["method"], [*(PART_HEADINGS.get(part, part) for part in parts), "prefix"])
    for name, profile in profiles.items():
        seconds = (f"{1000 * (profile['seconds'].get(part) or 0):.2f} ms" for part in parts)
        table.add_row(Text(name), *seconds, format_figure(profile["prefix_share"], "{:.0%}"))
    return table


def _difference_lines(report: dict[str, Any], decode: Callable[[list[int]], str]) -> list[Text]:
    """Makes a line of text for each sample whose tokens are not those of ``ar``."""
    lines = []
    for diff in report["differences"]:
        kind = "near tie" if diff["near_tie"] else "MISMATCH"
        tokens = (diff["token"], diff["reference"])
        token, ar = ("the end" if token is None else f"{decode([token])!r} ({token})" for token in tokens)
        gap = "" if diff["gap"] is None else f", logits {diff['gap']:.2g} apart"
        where = f"{diff['method']} on {diff['sample']}, new token {diff['position'] + 1}"
        lines.append(Text(f"{kind}: {where}: {token}, ar has {ar}{gap}", style="" if diff["near_tie"] else "red"))
    return lines
