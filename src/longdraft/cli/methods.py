"""``longdraft methods``: what there is to decode with."""

from __future__ import annotations

import json

from rich.table import Table
from rich.text import Text

from longdraft.cli import console, options
from longdraft.methods import METHODS
from longdraft.methods import methods as described


def methods(as_json: options.Json = False, debug: options.Debug = False) -> None:
    """List the methods. An exact one writes what the model alone would; it is only faster."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("method", "exact", "draft", "available", "what it does", "paper"):
        table.add_column(head, no_wrap=head in ("method", "exact", "draft", "available"), overflow="fold")
    for entry in described():
        table.add_row(
            Text(entry["name"]),
            "yes" if entry["exact"] else "approximate",
            "needed" if entry["needs_draft"] else "none",
            "yes" if entry["available"] else "no",
            Text(METHODS[entry["name"]].summary),
            Text(entry["paper"] or "-"),
        )
    console.stdout().print(table, soft_wrap=False)
    if as_json:
        console.line(json.dumps(described()))
