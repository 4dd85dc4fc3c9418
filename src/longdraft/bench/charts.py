"""The report's charts, on matplotlib: a colour, a marker and a dash for each method, the same in every chart.

Every chart exists twice, for a light and a dark page; files are written in light.
"""

from __future__ import annotations

import io
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
    """How a method is drawn: its colour on a light and on a dark page."""

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
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.edgecolor": theme.faint,
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
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
        figure, axes = _figure(self.title, 3.4)
        for name, points in self.drawn.items():
            own = self.look[name]
            colour = own.colours[theme.index]
            style: dict[str, Any] = {
                "color": colour,
                "marker": own.marker,
                "ls": "--" if own.dashed else "-",
                "label": name,
            }
            axes.plot([p.x for p in points], [p.y for p in points], lw=1.8, ms=5.5, **style)
            spread = [(p.x, p.low, p.high) for p in points if p.low is not None and p.high is not None]
            if spread:
                axes.vlines(*zip(*spread, strict=True), color=colour, lw=1.1, alpha=0.75)
        if self.reference is not None:
            axes.axhline(self.reference, color=theme.ink, lw=0.8)
        axes.set_ylim(bottom=0, top=1 if self.share else None)
        if self.share:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        if xs[0] > 0 and xs[-1] / xs[0] >= 4 and xs[-1] > 100:
            axes.set_xscale("log")
        ticks = _apart(xs, log=axes.get_xscale() == "log")
        axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        _legend(figure, axes)
        return figure

    def bars(self, theme: Theme) -> Any:
        figure, axes = _figure(self.title, 0.9 + 0.3 * len(self.drawn))
        names = list(self.drawn)
        for row, name in enumerate(names):
            point = self.series[name][0]
            axes.barh(row, point.y, height=0.62, color=self.look[name].colours[theme.index])
            if point.low is not None and point.high is not None:
                axes.hlines(row, point.low, point.high, color=theme.ink, lw=1.1)
            end = max(point.y, point.high or 0.0)
            text = f"{point.y:.0%}" if self.share else f"{point.y:.2f}"
            axes.annotate(text, (end, row), (4, 0), textcoords="offset points", va="center", fontsize=9)
        if self.reference is not None:
            axes.axvline(self.reference, color=theme.ink, lw=0.8)
        _rows(axes, names, self.y_label)
        axes.margins(x=0.12)
        if self.share:
            axes.set_xlim(right=1.1)  # room for the number behind a full bar
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        return figure


def _apart(xs: list[float], log: bool) -> list[float]:
    """Those whose labels do not run into each other, the last one always."""
    import math

    place = math.log if log else float
    whole = place(xs[-1]) - place(xs[0])
    kept = [xs[-1]]
    for x in reversed(xs[:-1]):
        if (place(kept[-1]) - place(x)) / whole > 0.08:
            kept.append(x)
    return kept[::-1]


def _rows(axes: Any, names: Sequence[str], x_label: str) -> None:
    """A bar a row, from the top, from 0 on."""
    axes.set_yticks(range(len(names)), names)
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
        figure, axes = _figure(self.title, 0.9 + 0.3 * len(self.rows))
        starts = [0.0] * len(self.rows)
        for part, colours in PART_COLOURS.items():
            widths = [max(0.0, parts.get(part, 0.0)) for _, parts in self.rows]
            look = {"color": colours[theme.index], "label": PART_NAMES[part]}
            axes.barh(range(len(widths)), widths, left=starts, height=0.62, **look)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        _rows(axes, [name for name, _ in self.rows], self.x_label)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        _legend(figure, axes, columns=4)
        return figure


def _figure(title: str, height: float) -> tuple[Any, Any]:
    """A figure that belongs to no window: matplotlib's global state stays untouched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES_WIDE, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _legend(figure: Any, axes: Any, columns: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=2.4, columnspacing=1.4)
