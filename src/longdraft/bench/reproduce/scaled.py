"""A table at a scale: how long prompts and answers are, which options methods get, and what that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longdraft.bench.experiment import Unit
from longdraft.bench.papers.table import SCALED_OPTIONS, Column, Line, Table
from longdraft.bench.settings import format_option
from longdraft.drafts.kinds import KINDS, kind_of
from longdraft.errors import LongdraftError
from longdraft.methods import METHODS
from longdraft.model.runner import TargetRunner
from longdraft.recipes import recipe_for, resolve

UnitResult = Mapping[str, Any]
"""The result of a unit, as JSON has it."""
Figures = tuple[dict[str, float | None], dict[str, Any]]
"""By key of :data:`~longdraft.bench.papers.table.FIGURES`, as the paper defines them; and a row for programs, as this
package defines its figures."""


@dataclass(frozen=True)
class ScaledTable:
    """A table at a scale.

    Attributes:
        small: the small scale; else the paper's.
        max_tokens, prompts: in the place of the scale's own; None: these.
        plan: "fixed" keeps the paper's trees; "auto" fits them to this machine.
        asked: ``system`` and arguments of the chat template, such as ``enable_thinking``.
    """

    table: Table
    small: bool
    max_tokens_override: int | None = None
    prompts_override: int | None = None
    plan: str = "fixed"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shrink(self) -> int:
        return self.table.small.shrink if self.small else 1

    @property
    def max_tokens(self) -> int:
        """New tokens of a prompt, at most."""
        return self.max_tokens_override or (self.table.small.max_tokens if self.small else self.table.max_tokens)

    @property
    def prompts(self) -> int | None:
        """Prompts of a column; None: all."""
        return self.prompts_override or (self.table.small.prompts if self.small else self.table.prompts)

    def prompt_tokens(self, column: Column) -> int | None:
        """Length of a column's prompts; None: as they are."""
        if column.tokens is not None:
            return column.tokens // self.shrink
        return self.table.small.context if self.small else None

    def options(self, line: Line, column: Column) -> dict[str, Any]:
        """Options of a line's method in a column."""
        known = METHODS[line.method].options if line.method in METHODS else ()
        given = {**line.options, **{name: x for name, x in column.options.items() if name in known}}
        return {name: max(1, x // self.shrink) if name in SCALED_OPTIONS else x for name, x in given.items()}

    def differences(self) -> list[str]:
        """Differences from the paper in all rows, by this scale."""
        found = []
        if self.max_tokens != self.table.max_tokens:
            found.append(f"up to {self.max_tokens:,} new tokens (paper: {self.table.max_tokens:,})")
        if self.prompts != self.table.prompts:
            found.append(f"prompts a column: {self.prompts} (paper: {self.table.prompts or 'all rows'})")
        if self.shrink > 1:
            part = {2: "half", 4: "a quarter", 8: "an eighth"}.get(self.shrink, f"1/{self.shrink}")
            found.append(f"prompts, KV budgets and counts of chunks are {part} of the paper's")
        elif self.small and any(column.tokens is None for column in self.table.columns):
            found.append(f"prompts are cut to {self.table.small.context:,} tokens")
        if self.small:
            found.append("answers go on to the last token, whatever the model ends")
        if self.plan != "fixed":
            found.append("trees are fitted to this machine by the planner; the paper's are fixed")
        return found


@dataclass(frozen=True)
class TableEntry:
    """A line in a column.

    Attributes:
        name: of the contender or view that it is. options: its method's, without the draft.
        units: what is measured for it.
    """

    line: Line
    column: Column
    name: str
    options: Mapping[str, Any]
    units: Sequence[str]
    temperature: float = 0.0


@dataclass
class TablePlan:
    """The measurement of a table.

    Attributes:
        units: by name. entries: lines in columns, and their units.
        figures: an entry's figures of its units: as the paper defines them, and a row for programs.
        notes: remarks on texts and methods. differs: differences from the paper by column.
    """

    units: Mapping[str, Unit]
    entries: Sequence[TableEntry]
    figures: Callable[[TableEntry, Sequence[UnitResult]], Figures]
    notes: Sequence[str] = ()
    differences: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def rows(self, table: Table, done: Mapping[str, UnitResult]) -> list[dict[str, Any]]:
        """Rows for programs, with the keys that docs/figures.md defines, from the units that are done."""
        rows = []
        for each in self.entries:
            if not (own := [done[unit] for unit in each.units if unit in done]):
                continue
            shown, row = self.figures(each, own)
            beside: dict[str, dict[str, Any]] = {}
            for (model, line, column, key), value in table.published.items():
                # The papers' figures in numbers are of the table's first temperature.
                if (line, column, table.temperatures[0]) == (each.line.name, each.column.name, each.temperature):
                    beside.setdefault(model, {"model": model})[key] = value
            rows.append(
                {
                    "line": each.line.name,
                    "column": each.column.name,
                    "temperature": each.temperature,
                    **row,
                    "as_published": shown,
                    "published": list(beside.values()),
                    "differs": _differing(each.line, each.options, self.differences.get(each.column.name, ())),
                }
            )
        return rows


def _differing(line: Line, options: Mapping[str, Any], more: Sequence[str]) -> list[str]:
    """Differences of a cell from the paper: the line's note, ``more``, and options that are not the paper's."""
    changed = [f"{name} {format_option(x)}" for name, x in options.items() if x != line.options.get(name)]
    return [*filter(None, (line.note, *more, f"with {', '.join(changed)}" if changed else ""))]


def drafts_by_kind(folders: Sequence[Path]) -> dict[str, Path]:
    """Draft folders and files by the kind of draft that they hold.

    Raises:
        CheckpointError: no draft.
    """
    # What is no folder or file may be a model's name on the hub.
    return {kind_of(folder).name if folder.exists() else "small-lm": folder for folder in folders}


def add_draft(method: str, options: Mapping[str, Any], drafts: Mapping[str, Path]) -> dict[str, Any]:
    """The options with the draft that the method takes, if one was given."""
    if method not in METHODS:
        return dict(options)
    # Of a method that takes any drafter, the draft is its drafter's. One that needs none drafts as the paper has it.
    drafting = METHODS[options.get("drafter", method)]
    kind = drafting.draft_kind if drafting.needs_draft else None
    return {**options, **({"draft": drafts[kind]} if kind is not None and kind in drafts else {})}


def why_unavailable(method: str, options: Mapping[str, Any], runner: TargetRunner) -> str | None:
    """Why a method cannot run on a target: a missing draft, or sizes that it was not trained for; None if it can."""
    try:
        if method in METHODS:
            recipe_for(*resolve(method, options), runner)
    except (LongdraftError, ValueError) as error:
        return str(error)
    return None


def describe_needs(table: Table) -> str:
    """Drafts by kind and data sets that a table needs, in a few words."""
    kinds: dict[str, None] = {}
    for line in table.lines:
        if line.method in METHODS:
            known = METHODS[line.method]
            kind = known.draft_kind if known.needs_draft else line.options.get("drafter")
            if kind in KINDS:
                kinds[kind] = None
    parts = [f"drafts: {', '.join(kinds)}"] if kinds else ["no draft"]
    return "; ".join([*parts, f"data: {', '.join(table.datasets)}"])
