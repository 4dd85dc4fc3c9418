"""The table of settings in the help of the training commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from longdraft.cli import console

if TYPE_CHECKING:
    from longdraft.training.settings import Described


def with_settings(settings: Callable[[], Sequence[Described]], title: str, base: type[Any] = TyperCommand) -> type[Any]:
    """A command class whose help ends with a table of settings.

    Args:
        settings: called when the help is shown, because loading them takes time.
    """

    class Documented(base):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            out = console.stdout()
            out.print(Text(f" Settings: {title}"))
            console.show(out, _table(settings()))

    return Documented


def _table(settings: Sequence[Described]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("setting", style="bold cyan", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("values")
    table.add_column("meaning", ratio=1)
    for each in settings:
        table.add_row(*map(Text, each))
    return table
