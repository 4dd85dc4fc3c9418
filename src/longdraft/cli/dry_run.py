"""The table of ``longdraft train --dry-run``: memory by part, tokens, steps and hours on a named GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from longdraft.cli import console
from longdraft.errors import ConfigError
from longdraft.memory.sizes import human

if TYPE_CHECKING:
    from longdraft.training.config import RunConfig

# Tokens that hours are told for where the data are unknown.
SOME = 1e9


def show(kind: str, config: RunConfig, gpu: str, gpus: int, tokens: float | None) -> dict[str, Any]:
    """Prints what a run would take; returns its figures.

    Raises:
        ConfigError: an unknown GPU, or a target that is no model.
    """
    from longdraft.training.dry_run import GPUS, UTILISATION, estimate

    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu} is not known. Known are {', '.join(GPUS)}.")
    found = estimate(kind, config, gpus, tokens)
    (speed, room), total = GPUS[gpu], found.bytes
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("memory of a GPU")
    table.add_column("", justify="right")
    for part, size in found.memory.items():
        table.add_row(part, human(size))
    fits = total <= room
    verdict = f"{human(total)} of {human(int(room))}: {'fits' if fits else 'does not fit'}"
    table.add_row(Text("together", style="bold"), Text(verdict, style="bold"))
    learned = SOME if found.steps is None else found.steps * found.step_tokens
    hours = found.hours(learned, gpu, gpus)
    run = (
        f"steps unknown (give --tokens, or data encoded by `longdraft train data`); {hours:,.1f} hours for each "
        f"{SOME / 1e9:.0f}B tokens"
        if found.steps is None
        else f"{found.steps:,} steps, {learned / 1e9:.2f}B tokens, {hours:,.1f} hours"
    )
    definitions = [
        f"Hours are an estimate: {UTILISATION:.0%} of a {gpu}'s {speed / 1e12:,.0f} bfloat16 TFLOP/s, on {gpus} "
        f"GPU{'s' * (gpus > 1)}; a token takes {found.draft / 1e9:.2f} GFLOP of the draft and "
        f"{found.target / 1e9:.2f} of the target, which reads every text {'once' if found.reads < 1 else 'each time'}.",
        "Memory is of texts of max_length tokens, all learned. Every GPU holds the whole target."
        + ("" if fits else " Less: recompute=true, smaller rows (with more accumulate), shorter max_length."),
    ]
    title = f"{found.draft_weights / 1e6:,.1f}M weights to train, {found.step_tokens:,} tokens a step: {run}"
    console.report([(title, table)], definitions=definitions)
    return {
        "memory_bytes": found.memory, "total_bytes": total, "fits": fits, "draft_weights": found.draft_weights,
        "step_tokens": found.step_tokens, "steps": found.steps, "tokens": learned, "hours": hours, "gpu": gpu,
        "gpus": gpus, "utilisation": UTILISATION,
    }  # fmt: skip
