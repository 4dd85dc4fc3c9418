"""Describes a paper's table as data: lines (methods with options), columns (settings) and the published figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal

from longdraft.metrics import Average, TokenCounts, average, standard_error

TableKind = Literal["speed", "needle", "quality"]
"""The command that measures a table: ``bench`` ("speed"), :mod:`longdraft.bench.needle`, ``bench quality``."""

FIGURES = {
    "accepted": ("accepted length", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:.2f}"),
    "speedup": ("speed-up", "{:.2f}x"),
    "rouge_l": ("ROUGE-L against full verification, in per cent", "{:.1f}"),
    "bleurt": ("BLEURT, in per cent", "{:.1f}"),
    "accuracy": ("accuracy", "{:.3f}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "draft_ms": ("drafting, ms a round", "{:.2f}"),
    "draft_forward_ms": ("a forward of the draft, ms", "{:.2f}"),
    "update_ms": ("updating the draft's cache, ms a round", "{:.2f}"),
    "attention_ms": ("the target's attention, ms a round", "{:.2f}"),
    "forward_ms": ("the rest of the target's forward, ms a round", "{:.2f}"),
    "verify_ms": ("the target's forward, ms a round", "{:.2f}"),
    "rest_ms": ("all else, ms a round", "{:.2f}"),
    "round_ms": ("a round, timed without the profiler, ms", "{:.2f}"),
    "prefill_s": ("prefill, seconds", "{:.2f}"),
    "score": ("score of the answers, in per cent", "{:.1f}"),
    "speedup_vs_full": ("speed-up over full verification", "{:.2f}x"),
}
"""By a figure's key: the figure's name in reports, and its ``str.format`` pattern. A figure is a measured number."""

SCALED_OPTIONS = ("budget", "chunks")
"""Options that count KV entries or chunks. The small scale divides these options and the prompt lengths alike."""


@dataclass(frozen=True)
class Line:
    """A line of a table: a method with options."""

    name: str  # the method's name in the paper's table
    method: str  # a method of longdraft, or a peer of the bench
    options: Mapping[str, Any] = field(default_factory=dict)  # the paper's options
    note: str = ""  # how longdraft's method differs from the paper's
    # An attention path to force, such as "sdpa". "own": this machine's default path, forced as the control of another:
    # neither fused layers nor CUDA graphs run. Empty: the machine's fastest way.
    attention: str = ""
    prefill_attention: str = ""  # an attention path for prompts; empty: as ``attention``
    cache_tokens: int | None = None  # in a column that varies ``chunk``, the size of the working cache, which is fixed
    # {an option of a column: the option of this line's method with the same meaning}
    renamed: Mapping[str, str] = field(default_factory=dict)
    draft_index: int | None = None  # which of the user's drafts of its kind the line needs; None: the first, or ours

    @property
    def attention_paths(self) -> tuple[str, str]:
        """``attention`` and ``prefill_attention``."""
        return self.attention, self.prefill_attention


@dataclass(frozen=True)
class Column:
    """A column of a table: a setting."""

    name: str  # the heading, unique in the table
    dataset: str  # name of a data set of the bench
    tokens: int | None = None  # length of the prompts; None: prompts are not cut
    batch: int = 1  # prompts decoded together
    # further options, for each method that has them. A column of a sweep has one value of an option
    options: Mapping[str, Any] = field(default_factory=dict)
    line_names: tuple[str, ...] = ()  # names of the lines with figures in this column; empty: all


@dataclass(frozen=True)
class SmallScale:
    """Sizes of a table's small scale. They let the embedded model finish within a quarter of an hour on two cores."""

    size_divisor: int = 1  # divisor of prompt lengths, KV budgets and numbers of retrieved chunks
    context: int = 2048  # prompt length (tokens) in columns without a length
    num_prompts: int = 2  # prompts of each column
    max_tokens: int = 48  # new tokens of each prompt, at most


FigureKey = tuple[str, str, str, str]
"""Model, line, column and figure of a published number."""


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper."""

    name: str  # "1" for a table, "fig4" for a figure
    title: str  # the subject in a few words
    kind: TableKind
    hardware: str  # of the paper, as models
    models: str
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    figures: tuple[str, ...]  # keys of ``FIGURES``, in the order in which a cell of ``published.md`` has its numbers
    # the sampling temperatures to measure; the published numbers are those of the first one
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 256  # new tokens of each prompt, at most
    num_prompts: int | None = None  # prompts of each column; None: all rows of the data set
    baseline: str = "ar"  # the line or method that speed-ups are relative to
    counts_bonus: bool = True  # the paper's accepted lengths include the bonus token
    length_average: Average = "pooled"  # how the paper averages accepted lengths
    rate_average: Average = "pooled"  # how the paper averages tokens/s, and so speed-ups
    # above 0, a text is a chain of thought, after which an answer of so many tokens is asked for
    answer_tokens: int = 0
    offload: bool = False  # the KV cache lies in host memory
    includes_prefill: bool = False  # the paper's tokens/s and speed-ups include the prefill
    small_scale: SmallScale = SmallScale()  # sizes for a quick run
    remarks: tuple[str, ...] = ()  # remarks on the paper's figures
    paper: str = ""  # name of the paper, which the package ``papers`` sets

    @property
    def heading(self) -> str:
        """``Table 1``, ``Figure 4``."""
        return f"Figure {self.name[3:]}" if self.name.startswith("fig") else f"Table {self.name}"

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the columns' data sets."""
        return tuple(dict.fromkeys(column.dataset for column in self.columns))

    @property
    def is_profiled(self) -> bool:
        """True if a figure is the time of a part of a round."""
        return any(key.endswith("_ms") for key in self.figures)

    @cached_property
    def published(self) -> dict[FigureKey, float]:
        """The numbers of ``published.md``. If they include no speed-ups, speed-ups are computed from tokens/s."""
        values = _published(f"{self.paper} {self.name}", self.figures)
        if self.kind == "speed" and not any(figure == "speedup" for *_, figure in values):
            for model, line, column, figure in list(values):
                base = values.get((model, self.baseline, column, "tokens_per_second"))
                if figure == "tokens_per_second" and base is not None:
                    values[model, line, column, "speedup"] = values[model, line, column, figure] / base
        return values

    @property
    def shown_figures(self) -> tuple[str, ...]:
        """Keys of the figures that reports show: ``figures``, and the speed-up of a table that compares methods."""
        has_speedup = self.kind == "speed" and not self.is_profiled and self.figures != ("tokens_per_second",)
        return tuple(dict.fromkeys((*self.figures, *(["speedup"] if has_speedup else []))))

    def acceptance_stats(self, counts: Iterable[TokenCounts]) -> dict[str, float | None]:
        """Returns the mean accepted length by the paper's definition, and the standard error of the mean.

        Args:
            counts: for each prompt, its new tokens and its verification forwards, each of which emits a bonus token.
        """
        by_paper = [(tokens if self.counts_bonus else tokens - forwards, forwards) for tokens, forwards in counts]
        method = self.length_average
        return {"accepted": average(by_paper, method), "standard_error": standard_error(by_paper, method)}

    def cells(self) -> list[tuple[Line, Column]]:
        """Returns each pair of a line and a column for which the paper has numbers."""
        pairs = [(line, column) for column in self.columns for line in self.lines]
        return [(line, column) for line, column in pairs if not column.line_names or line.name in column.line_names]


@dataclass(frozen=True)
class Paper:
    """A paper and its tables. ``name``: the paper's method in lower case; ``reference``: authors, year and arXiv id."""

    name: str
    title: str
    reference: str
    tables: tuple[Table, ...]


@cache
def _sections() -> dict[str, str]:
    """Reads the sections of ``published.md``: by heading, such as "longspec 1", the text below the heading."""
    text = resources.files(__package__).joinpath("published.md").read_text("utf-8")
    sections = (section.partition("\n") for section in text.split("\n## ")[1:])
    return {name: content.strip() for name, _, content in sections}


def _published(name: str, figures: Sequence[str]) -> dict[FigureKey, float]:
    """Reads the numbers of a section of ``published.md``. A cell has, for each figure, a number or "-" (none)."""
    values = {}
    for table in filter(None, _sections().get(name, "").split("\n\n")):
        # The head is: model, line, columns. A rule and the rows follow.
        (_, _, *columns), _, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
        for model, line, *cells in rows:
            for column, cell in zip(columns, cells, strict=True):
                for figure, value in zip(figures, cell.split(), strict=False):
                    if value != "-":
                        values[model, line, column, figure] = float(value)
    return values
