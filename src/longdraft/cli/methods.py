"""``longdraft methods``: lists the methods, or the options of one method."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from longdraft.bench.tables import new_table
from longdraft.cli import console, options

if TYPE_CHECKING:
    from longdraft.method import Method


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method's options.", show_default="all methods")] = None,
    *,
    user_files: options.UserFiles = None,
    output: options.OutputOptions,
) -> None:
    """List the methods, or the options of one. An exact method writes what the model alone would write."""
    from longdraft.registry import METHODS, get_method
    from longdraft.registry import methods as method_entries

    if name is not None:
        method = get_method(name)
        _show_options(method)
        output.print_json([asdict(option) | {"kind": option.kind.__name__} for option in method.options.values()])
        return
    view = new_table(["method", "exact", "draft", "available"])
    view.add_column("what it does")
    for entry in method_entries():
        summary = Text(METHODS[entry["name"]].summary)
        if entry["paper"]:
            summary.append("\n" + entry["paper"], style="dim")
        exact, draft = "yes" if entry["exact"] else "approximate", "needed" if entry["needs_draft"] else "none"
        view.add_row(Text(entry["name"]), exact, draft, "yes" if entry["available"] else "no", summary)
    console.print_renderable(console.stdout(), view)
    output.print_json(method_entries())


def _show_options(method: Method) -> None:
    """Prints a table of a method's options."""
    view = new_table(["-o name=value"])
    view.add_column("what it is, what it takes, and its default")
    for option in method.options.values():
        default = option.default_in_words and f"default {option.default_in_words}"
        takes = "; ".join(filter(None, (option.range_in_words, default)))
        view.add_row(Text(option.name), Text.assemble(option.help or "a drafter's option", "\n", (takes, "dim")))
    console.print_line(f"{method.name}: {method.summary}")
    console.print_renderable(console.stdout(), view)
