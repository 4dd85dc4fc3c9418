"""The table of ``longdraft train --dry-run``: memory by part, tokens, steps and hours on a named GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from longdraft.cli import console
from longdraft.memory.sizes import human

if TYPE_CHECKING:
    from longdraft.training.config import RunConfig


def show(kind: str, config: RunConfig, gpu: str, gpus: int, tokens: float | None) -> dict[str, Any]:
    """Prints what a run would take; returns its figures (:func:`longdraft.training.dry_run.estimate`)."""
    from longdraft.training.dry_run import GPUS, SOME, estimate

    found = estimate(kind, config, gpu, gpus, tokens)
    speed, room = GPUS[gpu]
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("memory of a GPU")
    table.add_column("", justify="right")
    for part, size in found["memory_bytes"].items():
        table.add_row(part, human(size))
    verdict = f"{human(found['total_bytes'])} of {human(int(room))}: {'fits' if found['fits'] else 'does not fit'}"
    table.add_row(Text("together", style="bold"), Text(verdict, style="bold"))
    run = (
        f"steps unknown (give --tokens, or data encoded by `longdraft train data`); {found['hours']:,.1f} hours for "
        f"each {SOME / 1e9:.0f}B tokens"
        if found["steps"] is None
        else f"{found['steps']:,} steps, {found['tokens'] / 1e9:.2f}B tokens, {found['hours']:,.1f} hours"
    )
    often = "once" if found["target_reads"] < 1 else "each time"
    definitions = [
        f"Hours are an estimate: {found['utilisation']:.0%} of a {gpu}'s {speed / 1e12:,.0f} bfloat16 TFLOP/s, on "
        f"{gpus} GPU{'s' * (gpus > 1)}; a token takes {found['draft_operations'] / 1e9:.2f} GFLOP of the draft and "
        f"{found['target_operations'] / 1e9:.2f} of the target, which reads every text {often}.",
        "Memory is of texts of max_length tokens, all learned. Every GPU holds the whole target."
        + ("" if found["fits"] else " Less: recompute=true, smaller rows (with more accumulate), shorter max_length."),
    ]
    weights = f"{found['draft_weights'] / 1e6:,.1f}M weights to train, {found['step_tokens']:,} tokens a step"
    console.report([(f"{weights}: {run}", table)], definitions=definitions)
    return found
