"""The report's charts, on matplotlib: a colour, a marker and a dash for each method, the same in every chart.

Every chart exists twice, for a light and a dark page; files are written in light.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longdraft.errors import CapabilityError

INCHES_WIDE = 6.0
# What looks different to colour-blind readers too (after Okabe and Ito), each for light and for dark pages.
_COLOURS = (
    ("#0072b2", "#4ba3e3"),
    ("#d55e00", "#f47b3f"),
    ("#009e73", "#2cc196"),
    ("#b8508f", "#e59ac8"),
    ("#c98a00", "#f2b134"),
    ("#2a9fd6", "#9bd7f7"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_GREYS = (("#6b7280", "#9aa3af"), ("#9ca3af", "#6f7885"))
# The parts of a round are shades of one colour that no method has, from the drafter to what is left over.
PART_COLOURS = {
    "draft": ("#5b3a29", "#e3c9a8"),
    "attention": ("#96694a", "#bf9670"),
    "forward": ("#c9a27e", "#8f6a4b"),
    "rest": ("#e6d8c8", "#5d4a3b"),
}
PART_NAMES = {"draft": "draft", "attention": "verify: attention", "forward": "verify: the rest", "rest": "overhead"}


@dataclass(frozen=True)
class Look:
    """A method's colours on a light and on a dark page, its marker and its line."""

    colours: tuple[str, str]
    marker: str
    dashed: bool = False


@dataclass(frozen=True)
class Theme:
    """Colours of what is no data. ``index`` picks from a :class:`Look`."""

    index: int
    ink: str
    faint: str


LIGHT = Theme(0, "#1f2933", "#d5dae0")
DARK = Theme(1, "#e4e7eb", "#3c4551")


@dataclass(frozen=True)
class Point:
    """A figure of one method: where it stands, its value, and the least and largest of what it sums up."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


# A theme -> a matplotlib ``Figure`` in it
Chart = Callable[[Theme], Any]


def looks(methods: Sequence[str], baselines: Sequence[str]) -> dict[str, Look]:
    """A look for each method.

    Args:
        baselines: those that others are measured against: grey, the first of them as a full line.
    """
    found: dict[str, Look] = {}
    others = [m for m in methods if m not in baselines]
    for i, name in enumerate(m for m in methods if m in baselines):
        found[name] = Look(_GREYS[min(i, 1)], "." if i == 0 else "x", dashed=i > 0)
    for i, name in enumerate(others):
        again = i >= len(_COLOURS)
        found[name] = Look(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)], dashed=again)
    return found


def available() -> None:
    """Raises CapabilityError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CapabilityError(
            "The report's charts need matplotlib, which is not installed: pip install 'longdraft[report]'."
        ) from None


def svg(chart: Chart, theme: Theme, background: str = "none") -> bytes:
    """The chart as SVG, its letters as outlines: it looks the same everywhere."""
    options = {"transparent": True} if background == "none" else {"facecolor": background}
    return _saved(chart, theme, format="svg", metadata={"Date": None, "Creator": None}, **options)


def png(chart: Chart) -> bytes:
    """The chart as PNG, on white."""
    return _saved(chart, LIGHT, format="png", dpi=160, facecolor="white")


def _saved(chart: Chart, theme: Theme, **options: Any) -> bytes:
    import matplotlib

    settings = {
        "svg.fonttype": "path",
        "svg.hashsalt": "longdraft",
        "font.size": 10,
        "figure.titlesize": 10.5,
        "figure.titleweight": "bold",
        "axes.edgecolor": theme.faint,
        "axes.labelcolor": theme.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "text.color": theme.ink,
        "text.parse_math": False,  # a name with dollars in it is a name
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "legend.frameon": False,
    }
    out = io.BytesIO()
    with matplotlib.rc_context(settings):
        figure = chart(theme)
        figure.savefig(out, bbox_inches="tight", pad_inches=0.06, **options)
    return out.getvalue()


@dataclass(frozen=True)
class Lines:
    """A chart: a line a method over numbers; where all have one x, a bar a method.

    Attributes:
        reference: a value to draw a thin line at.
        share: values are shares, shown in per cent.
    """

    title: str
    series: Mapping[str, Sequence[Point]]
    look: Mapping[str, Look]
    x_label: str
    y_label: str
    reference: float | None = None
    share: bool = False

    def __call__(self, theme: Theme) -> Any:
        return self.lines(theme) if len(self.xs) > 1 else self.bars(theme)

    @property
    def drawn(self) -> dict[str, Sequence[Point]]:
        return {name: points for name, points in self.series.items() if points}

    @property
    def xs(self) -> list[float]:
        return sorted({p.x for points in self.drawn.values() for p in points})

    def lines(self, theme: Theme) -> Any:
        xs = self.xs
        figure, axes = _figure(self.title, 3.0 + 0.2 * _legend_lines(list(self.drawn)))
        log = xs[0] > 0 and xs[-1] / xs[0] >= 4 and xs[-1] > 100
        if log:
            axes.set_xscale("log")
        beside = _beside(self.drawn, xs, log)
        for name, points in self.drawn.items():
            own = self.look[name]
            colour = own.colours[theme.index]
            style: dict[str, Any] = {
                "color": colour,
                "marker": own.marker,
                "ls": "--" if own.dashed else "-",
                "label": name,
            }
            axes.plot([beside(name, p.x) for p in points], [p.y for p in points], lw=1.8, ms=5.5, **style)
            spread = [(beside(name, p.x), p.low, p.high) for p in points if p.low is not None and p.high is not None]
            if spread:
                axes.vlines(*zip(*spread, strict=True), color=colour, lw=1.1, alpha=0.75)
        if self.reference is not None:
            axes.axhline(self.reference, color=theme.ink, lw=0.8)
        axes.set_ylim(bottom=0, top=1 if self.share else None)
        if self.share:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        ticks = _apart(xs, log)
        axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        _legend(figure, axes)
        return figure

    def bars(self, theme: Theme) -> Any:
        names = list(self.drawn)
        figure, axes = _figure(self.title, _height(names))
        for row, name in enumerate(names):
            point = self.series[name][0]
            axes.barh(row, point.y, height=0.62, color=self.look[name].colours[theme.index])
            if point.low is not None and point.high is not None:
                axes.hlines(row, point.low, point.high, color=theme.ink, lw=1.1)
            text = f"{point.y:.0%}" if self.share else f"{point.y:.2f}"
            # In a column of their own, where no bar, spread or reference runs through them.
            where = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            axes.annotate(text, (1, row), (6, 0), va="center", fontsize=9, annotation_clip=False, **where)
        if self.reference is not None:
            axes.axvline(self.reference, color=theme.ink, lw=0.8)
        _rows(axes, names, self.y_label)
        if self.share:
            axes.set_xlim(right=1)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        return figure


def _beside(drawn: Mapping[str, Sequence[Point]], xs: Sequence[float], log: bool) -> Callable[[str, float], float]:
    """The x of a method's point: spreads at the same x are moved side by side, so that none hides another."""
    names = [name for name, points in drawn.items() if any(p.low != p.high for p in points)]
    step = 0.012 * (math.log(xs[-1] / xs[0]) if log else xs[-1] - xs[0])
    moved = {name: step * (i - (len(names) - 1) / 2) for i, name in enumerate(names)}

    def place(name: str, x: float) -> float:
        by = moved.get(name, 0.0)
        return x * math.exp(by) if log else x + by

    return place


def _apart(xs: list[float], log: bool) -> list[float]:
    """The ticks whose labels do not overlap; always the last one."""
    place = math.log if log else float
    whole = place(xs[-1]) - place(xs[0])
    kept = [xs[-1]]
    for x in reversed(xs[:-1]):
        if (place(kept[-1]) - place(x)) / whole > 0.08:
            kept.append(x)
    return kept[::-1]


def _folded(name: str, width: int = 24) -> str:
    """A name with options, ``self:view=chunks:budget=4096``, in lines that leave a chart its room."""
    lines = [""]
    for piece in re.split(r"(?<=:)", name):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _height(names: Sequence[str]) -> float:
    """Inches of a chart of so many bars."""
    lines = max((_folded(name).count("\n") for name in names), default=0)
    return 1.1 + (0.3 + 0.15 * lines) * len(names)


def _rows(axes: Any, names: Sequence[str], x_label: str) -> None:
    """A bar a row, from the top, from 0 on."""
    axes.set_yticks(range(len(names)), [_folded(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(x_label)


@dataclass(frozen=True)
class Stacked:
    """A chart: a bar a row, made of the parts of a round.

    Attributes:
        rows: what a bar is called, and its parts, in milliseconds.
    """

    title: str
    rows: Sequence[tuple[str, Mapping[str, float]]]
    x_label: str

    def __call__(self, theme: Theme) -> Any:
        figure, axes = _figure(self.title, _height([name for name, _ in self.rows]) + 0.2)
        starts = [0.0] * len(self.rows)
        for part, colours in PART_COLOURS.items():
            widths = [max(0.0, parts.get(part, 0.0)) for _, parts in self.rows]
            look = {"color": colours[theme.index], "label": PART_NAMES[part]}
            axes.barh(range(len(widths)), widths, left=starts, height=0.62, **look)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        _rows(axes, [name for name, _ in self.rows], self.x_label)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        _legend(figure, axes, most=4)
        return figure


def _figure(title: str, height: float) -> tuple[Any, Any]:
    """A figure that belongs to no window: matplotlib's global state stays untouched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES_WIDE, height), layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left")  # above the names of bars too: these may take half of the width
    return figure, axes


def _legend(figure: Any, axes: Any, most: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = _legend_columns(labels, most)
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=2.4, columnspacing=1.4)


def _legend_columns(labels: Sequence[str], most: int) -> int:
    """Columns of a legend that fit the figure's width."""
    return max(1, min(most, 84 // (8 + max(map(len, labels)))))


def _legend_lines(labels: Sequence[str], most: int = 3) -> int:
    return -(-len(labels) // _legend_columns(labels, most))
