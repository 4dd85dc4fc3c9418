"""The curves of a run: loss, agreement and simulated acceptance by step, drawn from its log."""

from __future__ import annotations

import json
from pathlib import Path

from longdraft.errors import CapabilityError


def available() -> None:
    """Raises CapabilityError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CapabilityError(
            'curves: true needs the package matplotlib: pip install "longdraft[report]", or leave the setting out.'
        ) from None


def draw(log: Path, out: Path) -> None:
    """Draws the curves of a run.

    Args:
        log: the run's ``log.jsonl``. out: the picture, in the format that its name ends with.
    """
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(7, 8), layout="constrained")
    loss, agreement, simulated = figure.subplots(3, 1, sharex=True)
    loss.plot(steps, [row["loss"] for row in rows], linewidth=0.8)
    loss.set_ylabel("loss (nats)")
    # A step reports the levels that its batch had.
    for level in sorted({int(level) for row in rows for level in row["agreement"]}):
        pairs = [(row["step"], row["agreement"][f"{level}"]) for row in rows if f"{level}" in row["agreement"]]
        agreement.plot(*zip(*pairs, strict=True), linewidth=0.8, label=f"level {level}")
    agreement.set_ylabel("agreement (learned rows)")
    measured = [row for row in rows if "simulated" in row]
    for name in ("chain", "tree"):
        values = [row["simulated"][name] for row in measured]
        simulated.plot([row["step"] for row in measured], values, marker="o", label=name)
    simulated.set_ylabel("tokens a round (held out)")
    simulated.set_xlabel("step")
    for axes in (agreement, simulated):
        axes.legend()
    for axes in (loss, agreement, simulated):
        axes.grid(alpha=0.35)
    figure.savefig(out, dpi=120)
