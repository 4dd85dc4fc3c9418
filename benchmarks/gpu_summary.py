"""Writes the results of benchmarks/gpu.py as one Markdown page that is also readable on a screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpu_results import Result

# A row's "what" -> the title of its table, and the columns as heading: key.
TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "environment": ("Environment", {"": "name", "found": "value"}),
    "race": (
        "Probe: one layer's attention by path, milliseconds",
        {"tokens": "context", "rows": "rows", "capacity": "capacity", "fastest": "fastest", "hybrid": "hybrid",
         "flash": "flash", "triton": "triton", "sdpa": "sdpa", "cpu": "cpu", "broken": "broken"},
    ),
    "recorded": (
        "Probe: a forward of a few layers of an 8B model, kernel by kernel and recorded, milliseconds",
        {"path": "path", "tokens": "context", "rows": "rows", "capacity": "capacity", "recorded": "recorded",
         "eager": "eager_ms", "as a graph": "recorded_ms", "right": "right"},
    ),
    "profile": (
        "Probe: kernels of an unrecorded forward",
        {"tokens": "context", "rows": "rows", "launches a layer": "launches", "products": "products",
         "attention": "attention", "small kernels": "small", "GPU busy, ms": "busy_ms", "forward, ms": "wall_ms",
         "busy": "busy"},
    ),
    "rounds": (
        "Rounds at the shape of an 8B model, milliseconds; beside a plain step",
        {"model": "model", "method": "method", "tokens": "context", "room for": "room", "step": "step_ms",
         "round": "round_ms", "steps a round": "steps_a_round", "tokens a round": "tokens_a_round",
         "tokens/s": "tokens_per_second", "vs ar": "speedup_vs_ar", "repeats": "repeats"},
    ),
    "attention": (
        "Attention paths against the reference in float32",
        {"path": "path", "dtype": "dtype", "lengths": "lengths", "largest error": "error",
         "largest output": "output", "right": "right"},
    ),
    "graphs": (
        "Logits with CUDA graphs against without",
        {"path": "path", "dtype": "dtype", "recorded": "recorded", "nodes": "nodes", "largest error": "error",
         "right": "right"},
    ),
    "exact": (
        "Greedy output against `ar`, float32",
        {"setup": "setup", "method": "method", "tokens": "context_tokens", "samples": "samples",
         "near ties": "near_ties", "mismatches": "mismatches", "accepted": "mean_accepted_length", "right": "right"},
    ),
    "waits": (
        "How often a round waits for the GPU",
        {"method": "method", "rounds": "rounds", "waits a round": "waits"},
    ),
    "kernels": (
        "One layer's attention, milliseconds of GPU time",
        {"tokens": "context", "rows": "rows", "path": "path", "ms": "ms", "of copy bandwidth": "of_bandwidth",
         "Triton's bound": "bound_ms"},
    ),
    "steps": (
        "Steps of an 8B-shaped Llama, milliseconds; on paper: benchmarks/gpu_on_paper.py's limit",
        {"setup": "setup", "tokens": "context", "nodes": "nodes", "full": "full_ms", "on paper": "full_paper_ms",
         "measured / on paper": "full_ratio", "partial": "partial_ms", "on paper ": "partial_paper_ms",
         "measured / on paper ": "partial_ratio"},
    ),
    "texts": (
        "Whole texts, SmolLM2",
        {"setup": "setup", "method": "method", "tokens": "context_tokens", "tokens/s": "tokens_per_second",
         "vs ar": "speedup_vs_ar", "vs hf": "speedup_vs_hf", "accepted": "mean_accepted_length",
         "mismatches": "mismatches", "near ties": "near_ties"},
    ),
    "batches": (
        "Batches of prompts of different lengths, SmolLM2",
        {"setup": "setup", "batch": "batch", "method": "method", "tokens (median)": "context_tokens",
         "tokens/s": "tokens_per_second", "vs ar": "speedup_vs_ar", "accepted": "mean_accepted_length",
         "mismatches": "mismatches", "near ties": "near_ties"},
    ),
    "training": (
        "Training",
        {"draft": "draft", "steps": "steps", "learned tokens/s": "tokens_per_second", "first loss": "first_loss",
         "last loss": "last_loss"},
    ),
    "tables": (
        "Published drafts",
        {"dataset": "dataset", "tokens": "context_tokens", "method": "method", "tokens/s": "tokens_per_second",
         "vs ar": "speedup_vs_ar", "accepted": "mean_accepted_length", "mismatches": "mismatches",
         "near ties": "near_ties"},
    ),
}  # fmt: skip
# Columns whose figures need more than two decimals.
FINE = ("ms", "bound_ms", "error", "hybrid", "flash", "triton", "sdpa", "cpu")


def summary(found: Mapping[str, Result | None]) -> str:
    """The page.

    Args:
        found: the result of each stage, or None if it has none.
    """
    return "\n".join([*_head(found), *_tables(found), *_remarks(found)]) + "\n"


def problems(found: Mapping[str, Result | None]) -> list[str]:
    """Descriptions of wrong results and of failures."""
    said = []
    for name, result in found.items():
        for unit, rows, unit_found in _units(result):
            if why := unit_found.get("failed"):
                said.append(f"{name}, {unit}: {why}")
            said += [f"{name}, {unit}: {_described(row)}" for row in rows if row.get("right") is False]
        if result is not None and result["failed"] is not None:
            said.append(f"{name}: {result['failed']}")
    return said


def unfinished(found: Mapping[str, Result | None]) -> list[str]:
    """Stages that have something left to measure."""
    return [n for n, result in found.items() if result is None or result["state"] != "ended" or result["left_out"]]


def _head(found: Mapping[str, Result | None]) -> Iterator[str]:
    results = [result for result in found.values() if result is not None]
    headers = [result["header"] for result in results]
    yield "# longdraft on a GPU"
    yield ""
    for label, key in (("Device", "device"), ("Driver", "driver"), ("Processor", "processor"), ("Versions", "versions"),
                       ("Date", "date"), ("Command", "command")):  # fmt: skip
        values = dict.fromkeys(str(header[key]) for header in headers if header.get(key))
        if key == "date" and values:
            values = dict.fromkeys([min(values)[:10], max(values)[:10]])
        if values:
            yield f"- {label}: {'; '.join(values)}"
    units = [unit for result in results for unit in result["units"].values()]
    commits = dict.fromkeys(str(c) for c in [*(unit.get("commit") for unit in units)] if c)
    if commits:
        yield f"- Commit: {', '.join(commits)}"
    if any(header.get("asked", {}).get("smallest") for header in headers):
        yield "- Tiny sizes (`--smallest`): these figures mean nothing."
    yield ""


def _tables(found: Mapping[str, Result | None]) -> Iterator[str]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in found.values():
        for _, own, _ in _units(result):
            for row in own:
                rows.setdefault(row["what"], []).append(row)
    for what, (title, columns) in TABLES.items():
        if what in rows:
            # A column that is empty throughout is left out.
            shown = {h: k for h, k in columns.items() if any(row.get(k) is not None for row in rows[what])}
            lines = [list(shown), *([_cell(k, row.get(k)) for k in shown.values()] for row in rows[what])]
            yield f"## {title}"
            yield ""
            yield from _markdown(lines)
            yield ""


def _remarks(found: Mapping[str, Result | None]) -> Iterator[str]:
    lines = []
    for name, result in found.items():
        if result is None:
            lines.append(f"{name}: not measured")
            continue
        if result["skipped"]:
            lines.append(f"{name}: skipped: {result['skipped']}")
        if result["failed"]:
            lines.append(f"{name}: **broke**: {result['failed']}")
        if result["under_way"]:
            lines.append(f"{name}: cut off during {result['under_way']}")
        for unit, rows, unit_found in _units(result):
            if why := unit_found.get("skipped"):
                lines.append(f"{name}, {unit}: skipped: {why}")
            if why := unit_found.get("failed"):
                lines.append(f"{name}, {unit}: **broke**: {why}")
            lines += [f"{name}, {unit}: **wrong**: {_described(row)}" for row in rows if row.get("right") is False]
        lines += [f"{name}: no time for {unit}" for unit in result["left_out"]]
    yield "## Stages"
    yield ""
    took = ", ".join(f"{name} {result['seconds']:.0f} s" for name, result in found.items() if result is not None)
    yield f"- {took or 'nothing was measured'}"
    yield from (f"- {' '.join(line.split())}" for line in lines)


def _units(result: Result | None) -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    for name, unit in ({} if result is None else result["units"]).items():
        yield name, unit.get("rows", []), unit


def _described(row: Mapping[str, Any]) -> str:
    columns = TABLES[row["what"]][1] if row["what"] in TABLES else {key: key for key in row}
    return ", ".join(f"{heading} {_cell(key, row.get(key))}" for heading, key in columns.items() if key in row)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.1e}" if value and abs(value) < 0.001 else f"{value:,.{3 if key in FINE else 2}f}"
    return str(value).replace("|", "/")


def _markdown(lines: list[list[str]]) -> Iterator[str]:
    """The lines of a table whose columns are aligned on a screen."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for number, line in enumerate(lines):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
