"""A paper's table at a scale (the paper's, or a small one), and the plan that measures the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longdraft.bench.experiment import Unit
from longdraft.bench.papers.table import SCALED_OPTIONS, Column, Line, Table
from longdraft.bench.settings import format_option
from longdraft.bench.thinking import MAX_TURN_TOKENS
from longdraft.errors import CapabilityError, LongdraftError
from longdraft.model.runner import TargetRunner
from longdraft.recipes import recipe_for, resolve
from longdraft.registry import KINDS, METHODS, kind_of

UnitResult = Mapping[str, Any]
"""The result of a unit of measurement, as a JSON object."""
Figures = tuple[dict[str, float | None], dict[str, Any]]
"""Figures by the paper's definitions (keys: :data:`~longdraft.bench.papers.table.FIGURES`), and a row of figures by
longdraft's definitions (keys: docs/figures.md)."""


@dataclass(frozen=True)
class ScaledTable:
    """A table at a scale."""

    table: Table
    is_small: bool  # True: the small scale; False: the paper's scale
    max_tokens_override: int | None = None  # replaces the scale's new tokens; None: no override
    num_prompts_override: int | None = None  # replaces the scale's prompts of a column; None: no override
    plan: str = "fixed"  # "fixed": draft trees as in the paper; "auto": a planner fits draft trees to this machine
    # ``system`` and arguments of the chat template, such as ``enable_thinking``
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_divisor(self) -> int:
        """The number by which prompt lengths, KV budgets and numbers of chunks are divided."""
        return self.table.small_scale.size_divisor if self.is_small else 1

    @property
    def max_tokens(self) -> int:
        """New tokens of each prompt, at most."""
        scale = self.table.small_scale if self.is_small else self.table
        return self.max_tokens_override or scale.max_tokens

    @property
    def new_tokens(self) -> int:
        """Tokens after a prompt, at most: the text, and the answer that is asked for after a chain of thought."""
        answer_tokens = self.table.answer_tokens
        return self.max_tokens + (MAX_TURN_TOKENS + answer_tokens if answer_tokens else 0)

    @property
    def num_prompts(self) -> int | None:
        """Prompts of each column; None: all rows of the data set."""
        scale = self.table.small_scale if self.is_small else self.table
        return self.num_prompts_override or scale.num_prompts

    def prompt_tokens(self, column: Column) -> int | None:
        """Length of a column's prompts; None: prompts are not cut."""
        if column.tokens is not None:
            return column.tokens // self.size_divisor
        return self.table.small_scale.context if self.is_small else None

    def options(self, line: Line, column: Column) -> dict[str, Any]:
        """Returns the options of a cell's method, at this scale."""
        method_options = METHODS[line.method].options if line.method in METHODS else ()
        from_column = {line.renamed.get(name, name): value for name, value in column.options.items()}
        options = {**line.options, **{name: from_column[name] for name in from_column if name in method_options}}
        if line.cache_tokens is not None and "chunk" in column.options:  # chunks of another size in the same cache
            options["chunks"] = max(1, line.cache_tokens // options["chunk"])
        scaled = {name: max(1, options[name] // self.size_divisor) for name in options if name in SCALED_OPTIONS}
        return options | scaled

    def differences(self) -> list[str]:
        """Describes the differences of this scale from the paper that concern all rows."""
        texts = []
        if self.max_tokens != self.table.max_tokens:
            texts.append(f"up to {self.max_tokens:,} new tokens (paper: {self.table.max_tokens:,})")
        if self.num_prompts != self.table.num_prompts:
            texts.append(f"prompts a column: {self.num_prompts} (paper: {self.table.num_prompts or 'all rows'})")
        if self.size_divisor > 1:
            fraction = {2: "half", 4: "a quarter", 8: "an eighth"}.get(self.size_divisor, f"1/{self.size_divisor}")
            texts.append(f"prompts, KV budgets and counts of chunks are {fraction} of the paper's")
        elif self.is_small and any(column.tokens is None for column in self.table.columns):
            texts.append(f"prompts are cut to {self.table.small_scale.context:,} tokens")
        if self.is_small:
            texts.append("answers have all of their tokens: EOS is ignored")
        if self.plan != "fixed":
            texts.append("trees are fitted to this machine by the planner; the paper's are fixed")
        return texts


@dataclass(frozen=True)
class TableEntry:
    """A cell to measure: a line in a column, at a sampling temperature."""

    line: Line
    column: Column
    name: str  # the contender or the view that is measured
    options: Mapping[str, Any]  # options of the line's method, without the draft
    unit_names: Sequence[str]  # names of the units whose results give the figures of the cell
    temperature: float = 0.0


@dataclass
class TablePlan:
    """The plan of a table's measurements, and of how its figures follow from the results."""

    units: Mapping[str, Unit]  # the units to measure, by name
    entries: Sequence[TableEntry]  # the cells of the table
    # computes the figures of an entry from the results of the entry's units
    figures: Callable[[TableEntry, Sequence[UnitResult]], Figures]
    notes: Sequence[str] = ()  # remarks on texts and methods
    differences: Mapping[str, Sequence[str]] = field(default_factory=dict)  # differences from the paper, by column

    def rows(self, table: Table, results: Mapping[str, UnitResult]) -> list[dict[str, Any]]:
        """Makes the rows of the JSON object (docs/figures.md). ``results``: by the unit's name, the results so far."""
        rows = []
        for entry in self.entries:
            if not (entry_results := [results[name] for name in entry.unit_names if name in results]):
                continue
            as_published, row = self.figures(entry, entry_results)
            published: dict[str, dict[str, Any]] = {}
            for (model, line, column, key), value in table.published.items():
                # The published numbers are those of the table's first temperature.
                if (line, column, table.temperatures[0]) == (entry.line.name, entry.column.name, entry.temperature):
                    published.setdefault(model, {"model": model})[key] = value
            differences = _entry_differences(entry, self.differences.get(entry.column.name, ()))
            rows.append({
                "line": entry.line.name, "column": entry.column.name, "temperature": entry.temperature, **row,
                "as_published": as_published, "published": list(published.values()), "differs": differences,
            })  # fmt: skip
        return rows


def _entry_differences(entry: TableEntry, column_differences: Sequence[str]) -> list[str]:
    """Lists an entry's differences from the paper: the line's note, those of the column, and options that differ."""
    options, paper_options = entry.options, entry.line.options
    changed = [f"{name} {format_option(options[name])}" for name in options if options[name] != paper_options.get(name)]
    differences = (entry.line.note, *column_differences, f"with {', '.join(changed)}" if changed else "")
    return [difference for difference in differences if difference]


def drafts_by_kind(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Sorts draft folders and files by the kind of draft. Drafts of a kind keep their order.

    Raises:
        CheckpointError: a folder or file holds no draft.
    """
    # A path that does not exist is the hub id of a small language model.
    by_kind: dict[str, list[Path]] = {}
    for folder in folders:
        by_kind.setdefault(kind_of(folder).name if folder.exists() else "small-lm", []).append(folder)
    return by_kind


def add_draft(
    method: str, options: Mapping[str, Any], drafts: Mapping[str, Sequence[Path]], index: int | None = None
) -> dict[str, Any]:
    """Adds the user's draft to the options, if there is one of the method's kind: the first, or the one at ``index``.

    Raises:
        CapabilityError: there is no draft at ``index``.
    """
    if method not in METHODS:
        return dict(options)
    # The option ``drafter`` names another method, whose draft is needed. A method that needs no draft gets none.
    drafting_method = METHODS[options.get("drafter", method)]
    kind = drafting_method.draft_kind if drafting_method.needs_draft else None
    paths = () if kind is None else drafts.get(kind, ())
    if index is not None and index >= len(paths):
        raise CapabilityError(f"it needs draft {index + 1} of kind {kind}: give --draft for each, in this order")
    return {**options, **({"draft": paths[index or 0]} if paths else {})}


def refusal(
    line: Line, options: Mapping[str, Any], drafts: Mapping[str, Sequence[Path]], runner: TargetRunner
) -> str | None:
    """Returns why a line cannot run on a target, such as a missing draft; None if it can run."""
    try:
        options = add_draft(line.method, options, drafts, line.draft_index)
        if line.method in METHODS:
            recipe_for(*resolve(line.method, options), runner)
    except (LongdraftError, ValueError) as error:
        return str(error)
    return None


def describe_needs(table: Table) -> str:
    """Describes the kinds of drafts and the data sets that a table needs."""
    kinds: dict[str, None] = {}
    for line in table.lines:
        if line.method in METHODS:
            method = METHODS[line.method]
            kind = method.draft_kind if method.needs_draft else line.options.get("drafter")
            if kind in KINDS:
                kinds[kind] = None
    parts = [f"drafts: {', '.join(kinds)}"] if kinds else ["no draft"]
    return "; ".join([*parts, f"data: {', '.join(table.datasets)}"])
