"""A paper's table as data: what is measured in it, with which options, and the paper's own figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal

from longdraft.metrics import Average, TokenCounts, average, standard_error

TableKind = Literal["speed", "needle", "quality"]
"""The way to fill a table: by the bench, by asking drafters for needles, or by ``bench quality``."""

FIGURES = {
    "accepted": ("accepted length", "{:.2f}"),
    "tokens_per_second": ("tokens/s", "{:.2f}"),
    "speedup": ("speed-up", "{:.2f}x"),
    "rouge_l": ("ROUGE-L against full verification, in per cent", "{:.1f}"),
    "bleurt": ("BLEURT, in per cent", "{:.1f}"),
    "accuracy": ("accuracy", "{:.3f}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "draft_ms": ("drafting, ms a round", "{:.2f}"),
    "attention_ms": ("the target's attention, ms a round", "{:.2f}"),
    "forward_ms": ("the rest of the target's forward, ms a round", "{:.2f}"),
    "verify_ms": ("the target's forward, ms a round", "{:.2f}"),
    "rest_ms": ("all else, ms a round", "{:.2f}"),
}
"""By key: a figure's name and its format."""

SCALED_OPTIONS = ("budget", "chunks")
"""Options that count rows or chunks of a text, which shrink with it."""


@dataclass(frozen=True)
class Line:
    """A method of a table.

    Attributes:
        name: as the paper calls it.
        method: a method of this package, or a peer of its bench.
        options: the paper's.
        note: where ours is not the paper's.
        attention: attention path that it is forced to; empty: the machine's own.
    """

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    attention: str = ""


@dataclass(frozen=True)
class Column:
    """A setting of a table.

    Attributes:
        name: its heading, unique in the table.
        dataset: a data set by its name in the bench.
        tokens: length of the prompts; None: the rows as they are.
        batch: prompts decoded together.
        options: further options of every method that has them; a sweep varies them from column to column.
        line_names: names of the lines that the column is for; empty: all.
    """

    name: str
    dataset: str
    tokens: int | None = None
    batch: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    line_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class SmallScale:
    """The small scale: what ends within a quarter of an hour on two cores with the embedded model.

    Attributes:
        shrink: prompts, KV budgets and retrieved chunks are so many times smaller.
        context: prompts of columns without a length are cut to so many tokens.
        prompts: of each column; ``max_tokens``: new tokens of each.
    """

    shrink: int = 1
    context: int = 2048
    prompts: int = 2
    max_tokens: int = 48


FigureKey = tuple[str, str, str, str]
"""Model, line, column and figure of a published number."""


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper.

    Attributes:
        name: "1", or "fig4" of a figure.
        hardware, models: the paper's.
        figures: keys of :data:`FIGURES`.
        baseline: the line, or a method, that speed-ups are over.
        counts_bonus: the paper counts the bonus token in accepted lengths.
        lengths, rates: how the paper averages accepted lengths, and tokens/s, whose quotient is a speed-up.
        includes_prefill: the paper's tokens/s and speed-ups include reading the prompt.
        prompts: of each column; None: all rows.
        remarks: on the paper's figures.
        paper: its name.
    """

    name: str
    title: str
    kind: TableKind
    hardware: str
    models: str
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    figures: tuple[str, ...]
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 256
    prompts: int | None = None
    baseline: str = "ar"
    counts_bonus: bool = True
    length_average: Average = "pooled"
    rate_average: Average = "pooled"
    includes_prefill: bool = False
    small: SmallScale = SmallScale()
    remarks: tuple[str, ...] = ()
    paper: str = ""

    @property
    def heading(self) -> str:
        """``Table 1``, ``Figure 4``."""
        return f"Figure {self.name[3:]}" if self.name.startswith("fig") else f"Table {self.name}"

    @property
    def datasets(self) -> tuple[str, ...]:
        """The data sets, each once."""
        return tuple(dict.fromkeys(column.dataset for column in self.columns))

    @property
    def is_profiled(self) -> bool:
        """True if a figure is a part of a round's time."""
        return any(key.endswith("_ms") for key in self.figures)

    @cached_property
    def published(self) -> dict[FigureKey, float]:
        """The figures of ``published.md``, and speed-ups from its tokens/s where the paper does not print them."""
        found = _published(f"{self.paper} {self.name}", self.figures)
        if self.kind == "speed" and not any(figure == "speedup" for *_, figure in found):
            for model, line, column, figure in list(found):
                base = found.get((model, self.baseline, column, "tokens_per_second"))
                if figure == "tokens_per_second" and base is not None:
                    found[model, line, column, "speedup"] = found[model, line, column, figure] / base
        return found

    @property
    def shown_figures(self) -> tuple[str, ...]:
        """Keys of the figures that are shown: the paper's, and the speed-up where it follows from them."""
        speed = self.kind == "speed" and not self.is_profiled and self.figures != ("tokens_per_second",)
        return tuple(dict.fromkeys((*self.figures, *(["speedup"] if speed else []))))

    def acceptance_stats(self, texts: Iterable[TokenCounts]) -> dict[str, float | None]:
        """The accepted length of prompts as the paper counts and averages it, with its standard error."""
        counted = [(tokens if self.counts_bonus else tokens - forwards, forwards) for tokens, forwards in texts]
        return {
            "accepted": average(counted, self.length_average),
            "standard_error": standard_error(counted, self.length_average),
        }

    def cells(self) -> list[tuple[Line, Column]]:
        """Lines and the columns that they have figures in."""
        return [(line, c) for c in self.columns for line in self.lines if not c.line_names or line.name in c.line_names]


@dataclass(frozen=True)
class Paper:
    """A paper, by the name of its method."""

    name: str
    title: str
    reference: str
    tables: tuple[Table, ...]


@cache
def _sections() -> dict[str, str]:
    """The sections of ``published.md``."""
    text = resources.files(__package__).joinpath("published.md").read_text("utf-8")
    sections = (section.partition("\n") for section in text.split("\n## ")[1:])
    return {name: content.strip() for name, _, content in sections}


def _published(name: str, figures: Sequence[str]) -> dict[FigureKey, float]:
    found = {}
    for block in filter(None, _sections().get(name, "").split("\n\n")):
        (_, _, *columns), _, *rows = [[part.strip() for part in row.split("|")[1:-1]] for row in block.splitlines()]
        for model, line, *cells in rows:
            for column, cell in zip(columns, cells, strict=True):
                for figure, value in zip(figures, cell.split(), strict=False):
                    if value != "-":
                        found[model, line, column, figure] = float(value)
    return found
