"""The report of a bench: JSON rows, tables and remarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from longdraft.bench.contenders import Run
from longdraft.bench.peers import HF
from longdraft.bench.run import Disagreement, Measured
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import (
    Column,
    circumstances,
    count,
    depth_accepted,
    figure,
    filled,
    mean_of,
    median_of,
    ratio,
    table,
)

DEFINITIONS = (
    "tokens/s: new tokens / decode seconds, prefill excluded; the median of the rounds, then of the samples.",
    "speed-up: a sample's tokens/s over that of ar, or of transformers' generate (hf), on the same sample; the median.",
    "faster, slower: samples (batches) with a speed-up over ar above 1.02, and below 0.98.",
    "accepted: mean accepted length = new tokens / target forwards, bonus tokens counted, the prefill's token not.",
    "score: of the first round's answers against references, by data set (docs/figures.md); the mean of the samples.",
    "first token: seconds from a prompt of which nothing has been read to its first token; the median.",
    "view: rows of a longer text's KV that a draft, and in specpv a partial verification, sees: first rows + chunks x "
    "rows of each + last rows.",
    "differ: samples whose tokens are not those of ar. A near tie is no mismatch: there the two tokens' logits are at "
    "most 64 (float32) or 4 (bfloat16, float16) spacings of the dtype apart, which is what rounding may turn round.",
)

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
_COUNTED = ("faster_than_ar", "slower_than_ar")
# Speed-ups within so much of 1 are neither a win nor a loss: the same method run twice differs by as much.
LEVEL = 0.02


def columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The :data:`COLUMNS` that these rows have values for: ``hf`` may not have been measured."""
    alone = all(row["samples"] == row["batch"] for row in rows)  # of one, its speed-up says it
    return filled(rows, [column for column in COLUMNS if not (alone and column[1] in _COUNTED)])


def rows(names: Sequence[str], measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """A row for each method, data set, context and batch, with the keys that docs/figures.md defines.

    Args:
        names: the contenders, in the order of the table.
    """
    cells: dict[tuple[str, int | None, int], list[Measured]] = {}
    for m in measured:
        cells.setdefault((m.dataset, m.context, m.batch), []).append(m)
    return [_row(name, own, names) for own in cells.values() for name in names]


def _row(name: str, measured: Sequence[Measured], names: Sequence[str]) -> dict[str, Any]:
    differences = [d.difference for m in measured for d in m.disagreements if d.method == name]
    comparable = all(name in m.comparable for m in measured)
    near_ties = sum(d.near_tie for d in differences)
    runs = [run for m in measured for run in m.rounds[name]]
    peaks = [m.peak_memory_bytes.get(name) for m in measured]
    speedups = [] if name == REFERENCE else over(measured, name, REFERENCE)
    row = {
        "method": name,
        "dataset": measured[0].dataset,
        "context_tokens": round(median(n for m in measured for n in m.prompt_tokens)),
        "batch": measured[0].batch,
        "samples": sum(m.batch for m in measured),
        "tokens_per_second": median_of(m.tokens_per_second(name) for m in measured),
        "speedup_vs_ar": median_of(over(measured, name, REFERENCE)),
        "speedup_vs_hf": median_of(over(measured, name, HF)) if HF in names else None,
        "mean_accepted_length": median_of(run.mean_accepted_length for run in runs),
        "ttft_seconds": median_of(m.cold[name].first_token_seconds if name in m.cold else None for m in measured),
        "mismatches": len(differences) - near_ties if comparable else None,
        "near_ties": near_ties if comparable else None,
        "context": measured[0].context,
        "tokens_per_second_spread": _spread(measured, lambda rounds, i: rounds[name][i].tokens_per_second),
        "speedup_vs_ar_spread": _spread(
            measured,
            lambda rounds, i: ratio(rounds[name][i].tokens_per_second, rounds[REFERENCE][i].tokens_per_second),
        ),
        "speedup_vs_ar_range": [min(speedups), max(speedups)] if speedups else None,
        "faster_than_ar": faster(speedups) if speedups else None,
        "slower_than_ar": slower(speedups) if speedups else None,
        "depth_accepted": depth_accepted([pair for run in runs for pair in run.accepted]),
        "peak_memory_bytes": max((b for b in peaks if b is not None), default=None),
        "view": next((run.view for run in runs if run.view), None),
        "scored": measured[0].scored or None,
        "score": mean_of(score for m in measured for score in m.scores.get(name, ())),
    }
    if partial_tokens := sum(run.partial_tokens for run in runs):
        row["rolled_back"] = sum(run.rolled_back for run in runs) / partial_tokens
    return row


def _spread(
    measured: Sequence[Measured], figure: Callable[[dict[str, list[Run]], int], float | None]
) -> list[float] | None:
    """Lowest and highest round; a round's figure is the median of its samples."""
    repeats = min(len(m.rounds[REFERENCE]) for m in measured)
    found = [median_of(figure(m.rounds, i) for m in measured) for i in range(repeats)]
    known = [x for x in found if x is not None]
    return [min(known), max(known)] if known else None


def over(measured: Sequence[Measured], name: str, reference: str) -> list[float]:
    """A method's tokens/s / the reference's, of every batch that both decoded."""
    both = [m for m in measured if name in m.rounds and reference in m.rounds]
    ratios = [ratio(m.tokens_per_second(name), m.tokens_per_second(reference)) for m in both]
    return [x for x in ratios if x is not None]


def faster(speedups: Sequence[float]) -> int:
    """Counts the wins."""
    return sum(x > 1 + LEVEL for x in speedups)


def slower(speedups: Sequence[float]) -> int:
    """Counts the losses."""
    return sum(x < 1 - LEVEL for x in speedups)


def document(
    names: Sequence[str], measured: Sequence[Measured], notes: Mapping[str, str] | None = None, complete: bool = True
) -> dict[str, Any]:
    """The report as one JSON object.

    Args:
        notes: remarks about contenders, by name.
        complete: no batch is missing.
    """
    return {
        "rows": rows(names, measured),
        **circumstances(),
        "differences": [difference(d) | {"context": m.context} for m in measured for d in m.disagreements],
        "notes": dict(notes or {}),
        "complete": complete,
    }


def difference(found: Disagreement) -> dict[str, Any]:
    """A difference as a JSON object."""
    d = found.difference
    return {
        "method": found.method,
        "dataset": found.dataset,
        "sample": found.sample,
        "position": d.position,
        "token": d.token,
        "reference": d.reference,
        "gap": d.gap if math.isfinite(d.gap) else None,
        "near_tie": d.near_tie,
    }


def tables(report: dict[str, Any]) -> list[tuple[str, Table]]:
    """A title and a table for each data set, context and batch."""
    found: dict[tuple[str, int | None, int], tuple[str, Table]] = {}
    known = columns(report["rows"])
    shown = [column for column in known if column != VIEW]
    for row in report["rows"]:
        cell = row["dataset"], row["context"], row["batch"]
        if cell not in found:
            found[cell] = (_title(row), table(["method"], [head for head, *_ in shown]))
            found[cell][1].add_column("differ")
            if VIEW in known:  # text, which may be wrapped
                found[cell][1].add_column(VIEW[0])
        figures = (figure(row.get(key), form) for _, key, form in shown)
        views = [figure(row["view"], "{}")] if VIEW in known else []
        found[cell][1].add_row(Text(row["method"]), *figures, _agreement(row), *views)
    return list(found.values())


def _title(row: dict[str, Any]) -> str:
    samples = count(row["samples"], "sample")
    batch = f", {row['batch']} at a time" if row["batch"] > 1 else ""
    return f"{row['dataset']}: {samples}{batch}, {row['context_tokens']:,} prompt tokens"


def _agreement(row: dict[str, Any]) -> Text:
    if row["mismatches"] is None:
        return Text("not comparable")
    ties = count(row["near_ties"], "near tie")
    if row["mismatches"]:
        text = f"{row['mismatches']} mismatch" + ("es" if row["mismatches"] > 1 else "")
        return Text(text + (f", {ties}" if row["near_ties"] else ""), style="red")
    return Text(ties if row["near_ties"] else "none")


def listing(report: dict[str, Any], decode: Any) -> list[str]:
    """A line for each sample whose tokens are not those of ``ar``.

    Args:
        decode: makes text of token ids.
    """
    lines = []
    for d in report["differences"]:
        kind = "near tie" if d["near_tie"] else "MISMATCH"
        own, reference = (
            "the end" if d[key] is None else f"{decode([d[key]])!r} ({d[key]})" for key in ("token", "reference")
        )
        gap = "" if d["gap"] is None else f", logits {d['gap']:.2g} apart"
        lines.append(
            f"{kind}: {d['method']} on {d['sample']}, new token {d['position'] + 1}: {own}, ar has {reference}{gap}"
        )
    return lines
