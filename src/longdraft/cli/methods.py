"""``longdraft methods``: what there is to decode with."""

from __future__ import annotations

from rich.text import Text

from longdraft.bench.tables import table
from longdraft.cli import console, options
from longdraft.methods import METHODS
from longdraft.methods import methods as described


def methods(*, composed: options.Load = None, output: options.Output) -> None:
    """List the methods. An exact one writes what the model alone would; it is only faster."""
    made = table(["method", "exact", "draft", "available"])
    made.add_column("what it does")
    for entry in described():
        summary = Text(METHODS[entry["name"]].summary)
        if entry["paper"]:
            summary.append("\n" + entry["paper"], style="dim")
        made.add_row(
            Text(entry["name"]),
            "yes" if entry["exact"] else "approximate",
            "needed" if entry["needs_draft"] else "none",
            "yes" if entry["available"] else "no",
            summary,
        )
    console.show(console.stdout(), made)
    output.json(described())
