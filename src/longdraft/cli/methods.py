"""``longdraft methods``: what there is to decode with."""

from __future__ import annotations

import json

from rich.table import Table
from rich.text import Text

from longdraft.cli import console, options
from longdraft.methods import METHODS
from longdraft.methods import methods as described


def methods(composed: options.Load = None, as_json: options.Json = False, debug: options.Debug = False) -> None:
    """List the methods. An exact one writes what the model alone would; it is only faster."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("method", "exact", "draft", "available"):
        table.add_column(head, no_wrap=True)
    table.add_column("what it does")
    for entry in described():
        summary = Text(METHODS[entry["name"]].summary)
        if entry["paper"]:
            summary.append("\n" + entry["paper"], style="dim")
        table.add_row(
            Text(entry["name"]),
            "yes" if entry["exact"] else "approximate",
            "needed" if entry["needs_draft"] else "none",
            "yes" if entry["available"] else "no",
            summary,
        )
    console.show(console.stdout(), table)
    if as_json:
        console.line(json.dumps(described()))
