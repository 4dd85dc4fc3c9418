"""A paper's table at the paper's or the small scale, and the plan of its measurement."""

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
"""The result of a unit, as a JSON object."""
Figures = tuple[dict[str, float | None], dict[str, Any]]
"""Figures by the paper's definitions (keys: :data:`~longdraft.bench.papers.table.FIGURES`), and a row by longdraft's
(docs/figures.md)."""


@dataclass(frozen=True)
class ScaledTable:
    """A table at a scale.

    Attributes:
        small: True: the small scale; False: the paper's.
        max_tokens_override: replaces the scale's new tokens; None: no override.
        prompts_override: replaces the scale's prompts of a column; None: no override.
        plan: "fixed": the paper's trees; "auto": a planner fits trees to this machine.
        template_kwargs: ``system`` and arguments of the chat template, such as ``enable_thinking``.
    """

    table: Table
    small: bool
    max_tokens_override: int | None = None
    prompts_override: int | None = None
    plan: str = "fixed"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shrink(self) -> int:
        """Divisor of prompt lengths, KV budgets and numbers of chunks."""
        return self.table.small.shrink if self.small else 1

    @property
    def max_tokens(self) -> int:
        """New tokens of each prompt, at most."""
        return self.max_tokens_override or (self.table.small.max_tokens if self.small else self.table.max_tokens)

    @property
    def prompts(self) -> int | None:
        """Prompts of each column; None: all rows of the data set."""
        return self.prompts_override or (self.table.small.prompts if self.small else self.table.prompts)

    def prompt_tokens(self, column: Column) -> int | None:
        """Length of a column's prompts; None: prompts are not cut."""
        if column.tokens is not None:
            return column.tokens // self.shrink
        return self.table.small.context if self.small else None

    def options(self, line: Line, column: Column) -> dict[str, Any]:
        """The options of a cell's method, at this scale."""
        method_options = METHODS[line.method].options if line.method in METHODS else ()
        options = {**line.options, **{name: x for name, x in column.options.items() if name in method_options}}
        return {name: max(1, x // self.shrink) if name in SCALED_OPTIONS else x for name, x in options.items()}

    def differences(self) -> list[str]:
        """Descriptions of how this scale differs from the paper in all rows."""
        texts = []
        if self.max_tokens != self.table.max_tokens:
            texts.append(f"up to {self.max_tokens:,} new tokens (paper: {self.table.max_tokens:,})")
        if self.prompts != self.table.prompts:
            texts.append(f"prompts a column: {self.prompts} (paper: {self.table.prompts or 'all rows'})")
        if self.shrink > 1:
            part = {2: "half", 4: "a quarter", 8: "an eighth"}.get(self.shrink, f"1/{self.shrink}")
            texts.append(f"prompts, KV budgets and counts of chunks are {part} of the paper's")
        elif self.small and any(column.tokens is None for column in self.table.columns):
            texts.append(f"prompts are cut to {self.table.small.context:,} tokens")
        if self.small:
            texts.append("answers have all of their tokens: EOS is ignored")
        if self.plan != "fixed":
            texts.append("trees are fitted to this machine by the planner; the paper's are fixed")
        return texts


@dataclass(frozen=True)
class TableEntry:
    """A line in a column.

    Attributes:
        name: the measured contender or view.
        options: options of its method, without the draft.
        units: names of the units whose results give the entry's figures.
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
        units: the units to measure, by name.
        entries: the cells of the table.
        figures: (entry, results of its units) -> the entry's figures.
        notes: remarks on texts and methods.
        differences: differences from the paper, by column.
    """

    units: Mapping[str, Unit]
    entries: Sequence[TableEntry]
    figures: Callable[[TableEntry, Sequence[UnitResult]], Figures]
    notes: Sequence[str] = ()
    differences: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def rows(self, table: Table, done: Mapping[str, UnitResult]) -> list[dict[str, Any]]:
        """Rows of the JSON object (docs/figures.md). ``done``: results by the unit's name."""
        rows = []
        for entry in self.entries:
            if not (results := [done[unit] for unit in entry.units if unit in done]):
                continue
            as_published, row = self.figures(entry, results)
            published: dict[str, dict[str, Any]] = {}
            for (model, line, column, key), value in table.published.items():
                # Published numbers are those of the table's first temperature.
                if (line, column, table.temperatures[0]) == (entry.line.name, entry.column.name, entry.temperature):
                    published.setdefault(model, {"model": model})[key] = value
            rows.append(
                {
                    "line": entry.line.name,
                    "column": entry.column.name,
                    "temperature": entry.temperature,
                    **row,
                    "as_published": as_published,
                    "published": list(published.values()),
                    "differs": _entry_differences(entry, self.differences.get(entry.column.name, ())),
                }
            )
        return rows


def _entry_differences(entry: TableEntry, of_column: Sequence[str]) -> list[str]:
    """Differences from the paper: the line's note, the column's differences, and changed options."""
    paper = entry.line.options
    changed = [f"{name} {format_option(x)}" for name, x in entry.options.items() if x != paper.get(name)]
    return [*filter(None, (entry.line.note, *of_column, f"with {', '.join(changed)}" if changed else ""))]


def drafts_by_kind(folders: Sequence[Path]) -> dict[str, Path]:
    """Draft folders and files by kind of draft.

    Raises:
        CheckpointError: a folder or file is no draft.
    """
    # A path that does not exist is taken for the hub id of a small language model.
    return {kind_of(folder).name if folder.exists() else "small-lm": folder for folder in folders}


def add_draft(method: str, options: Mapping[str, Any], drafts: Mapping[str, Path]) -> dict[str, Any]:
    """Adds the user's draft to the options, if there is one of the method's kind."""
    if method not in METHODS:
        return dict(options)
    # A method with a ``drafter`` option takes its drafter's draft. A method that needs no draft gets none.
    drafting_method = METHODS[options.get("drafter", method)]
    kind = drafting_method.draft_kind if drafting_method.needs_draft else None
    return {**options, **({"draft": drafts[kind]} if kind is not None and kind in drafts else {})}


def refusal(method: str, options: Mapping[str, Any], runner: TargetRunner) -> str | None:
    """Why a method cannot run on a target: its draft is missing, or does not fit the options; None if it can run."""
    try:
        if method in METHODS:
            recipe_for(*resolve(method, options), runner)
    except (LongdraftError, ValueError) as error:
        return str(error)
    return None


def describe_needs(table: Table) -> str:
    """The kinds of drafts and the data sets that a table needs, in words."""
    kinds: dict[str, None] = {}
    for line in table.lines:
        if line.method in METHODS:
            method = METHODS[line.method]
            kind = method.draft_kind if method.needs_draft else line.options.get("drafter")
            if kind in KINDS:
                kinds[kind] = None
    parts = [f"drafts: {', '.join(kinds)}"] if kinds else ["no draft"]
    return "; ".join([*parts, f"data: {', '.join(table.datasets)}"])
