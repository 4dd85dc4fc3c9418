"""The report's charts, drawn with matplotlib. A method has the same colour and marker in every chart."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from longdraft.errors import CapabilityError

INCHES_WIDE = 6.0
INK = "#1f2933"
# Colours that read on a light and on a dark page, and that colour-blind readers tell apart (after Okabe and Ito).
_COLOURS = ("#1d87c9", "#dd6b20", "#12a37c", "#c465a0", "#c4931b", "#7a86dc")
_MARKERS = "os^DvPX"
_BASELINES = "#89939e"
PARTS = {
    "draft": ("draft", "#7d5138"),
    "attention": ("verify: attention", "#a8744d"),
    "forward": ("verify: the rest", "#cf9f74"),
    "rest": ("overhead", "#9d968d"),
}
"""By part of a round: its name and its colour, one that no method has."""
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "longdraft",
    "figure.titlesize": 10.5,
    "figure.titleweight": "bold",
    "axes.edgecolor": _BASELINES,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _BASELINES,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # a name with dollars in it is a name
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}

Style = Mapping[str, str]
"""A method's colour, marker and linestyle, as arguments of matplotlib."""
Drawing = Callable[..., Any]


@dataclass(frozen=True)
class Point:
    """A value of one method: its place on the x axis, the value, and its lowest and highest if it sums up several."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None

    @property
    def spread(self) -> tuple[float, float]:
        """Distances of the lowest and the highest from the value; 0 where they are not below and above it."""
        below = 0.0 if self.low is None else self.y - self.low
        above = 0.0 if self.high is None else self.high - self.y
        return max(0.0, below), max(0.0, above)


def styles(methods: Sequence[str], baselines: Sequence[str] = ()) -> dict[str, Style]:
    """A style for each method.

    Args:
        baselines: methods that the others are measured against; they are grey.
    """
    others = [name for name in methods if name not in baselines]
    found: dict[str, Style] = {}
    for i, name in enumerate([name for name in methods if name in baselines]):
        found[name] = {"color": _BASELINES, "marker": ".x+1234"[i % 7], "linestyle": "--" if i else "-"}
    for i, name in enumerate(others):
        line = "-" if i < len(_COLOURS) else "--"
        found[name] = {
            "color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)], "linestyle": line,
        }  # fmt: skip
    return found


def available() -> None:
    """Raises CapabilityError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CapabilityError(
            "The report's charts need matplotlib, which is not installed: pip install 'longdraft[report]'."
        ) from None


def _styled(draw: Drawing) -> Drawing:
    """Runs a function with this module's settings of matplotlib, which are the user's again afterwards."""

    @wraps(draw)
    def styled(*arguments: Any, **options: Any) -> Any:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*arguments, **options)

    return styled


@_styled
def image(figure: Any, form: str) -> bytes:
    """A figure on white, as a file of this format: ``png``, ``svg``."""
    out = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type")) if form == "svg" else None
    figure.savefig(
        out, format=form, dpi=160, facecolor="white", bbox_inches="tight", pad_inches=0.06, metadata=metadata
    )
    return out.getvalue()


def inline(figure: Any) -> str:
    """A figure as an SVG element for a page: transparent, its text in the page's colour."""
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    text = image(figure, "svg").decode()
    return text[text.index("<svg") :].replace(INK, "currentColor")


@_styled
def lines(
    title: str,
    series: Mapping[str, Sequence[Point]],
    style: Mapping[str, Style],
    x_label: str,
    y_label: str,
    reference: float | None = None,
    share: bool = False,
) -> Any:
    """A figure with a line for each method; with a bar for each if all points have the same x.

    Args:
        series: the points of each method, one at least.
        reference: a value to draw a thin line at.
        share: the values are shares, shown in per cent, over small whole numbers; else x is logarithmic.
    """
    from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

    xs = sorted({point.x for points in series.values() for point in points})
    if len(xs) == 1:
        return _bars(title, {name: points[0] for name, points in series.items()}, style, y_label, reference)
    figure, axes = _figure(title, 3.0)
    if not share:
        axes.set_xscale("log")
        margin = (xs[-1] / xs[0]) ** 0.05
        axes.set_xlim(xs[0] / margin, xs[-1] * margin)
        axes.set_xticks(xs, [f"{x:,.0f}" for x in xs])
        axes.xaxis.set_minor_locator(NullLocator())
    for i, (name, points) in enumerate(series.items()):
        # Side by side on the logarithmic axis, so that no spread hides another.
        beside = 1.0 if share else (xs[-1] / xs[0]) ** (0.01 * (i - (len(series) - 1) / 2))
        spreads = list(zip(*(point.spread for point in points), strict=True))
        axes.errorbar(
            [beside * point.x for point in points], [point.y for point in points],
            yerr=spreads if any(map(any, spreads)) else None,
            label=name, linewidth=1.8, markersize=5.5, elinewidth=1.1, **style[name],
        )  # fmt: skip
    if reference is not None:
        axes.axhline(reference, color=INK, linewidth=0.8)
    axes.set_ylim(bottom=0, top=1 if share else None)
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(figure, axes, 3)
    return figure


def _bars(
    title: str, points: Mapping[str, Point], style: Mapping[str, Style], label: str, reference: float | None
) -> Any:
    figure, axes = _figure(title, _height(points))
    for row, (name, point) in enumerate(points.items()):
        spread = [[distance] for distance in point.spread]
        axes.barh(row, point.y, height=0.62, color=style[name]["color"], xerr=spread, ecolor=INK)
        # The numbers have a column of their own, where nothing runs through them.
        axes.text(1.02, row, f"{point.y:.2f}", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    if reference is not None:
        axes.axvline(reference, color=INK, linewidth=0.8)
    _rows(axes, points, label)
    return figure


@_styled
def grouped(
    title: str,
    columns: Sequence[str],
    bars: Mapping[str, Sequence[float | None]],
    marks: Mapping[str, Sequence[Sequence[float]]],
    style: Mapping[str, Style],
    label: str,
) -> Any:
    """A figure with a group of bars for each column, a bar for each method.

    Args:
        bars: by method, a value for each column; None: no bar. marks: others' values, drawn as short lines.
    """
    figure, axes = _figure(title, 3.0)
    width = 0.8 / max(1, len(bars))
    for i, (name, values) in enumerate(bars.items()):
        places = [x + width * (i - (len(bars) - 1) / 2) for x in range(len(columns))]
        axes.bar(places, [value or 0.0 for value in values], 0.9 * width, color=style[name]["color"], label=name)
        for place, others in zip(places, marks[name], strict=True):
            axes.hlines(others, place - 0.45 * width, place + 0.45 * width, color=INK, linewidth=1.2)
    axes.set_xticks(range(len(columns)), columns, rotation=30 if len(columns) > 5 else 0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(label)
    _legend(figure, axes, 3)
    return figure


@_styled
def stacked(title: str, rows: Mapping[str, Mapping[str, float]], label: str) -> Any:
    """A figure with a bar for each row, made of the parts of a round in :data:`PARTS`."""
    figure, axes = _figure(title, _height(rows))
    starts = [0.0] * len(rows)
    for part, (name, colour) in PARTS.items():
        widths = [max(0.0, parts.get(part, 0.0)) for parts in rows.values()]
        axes.barh(range(len(rows)), widths, left=starts, height=0.62, color=colour, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    _rows(axes, rows, label)
    _legend(figure, axes, 4)
    return figure


def _figure(title: str, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES_WIDE, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    return figure, figure.add_subplot()


def _folded(name: str) -> str:
    """A name with many options on several lines, which leaves a chart its room."""
    return name if len(name) <= 24 else re.sub(r"(.{1,24}:)(?=.)", "\\1\n", name)


def _height(names: Mapping[str, Any]) -> float:
    """Inches of a chart with these bars."""
    lines = max(_folded(name).count("\n") for name in names)
    return 1.1 + (0.3 + 0.15 * lines) * len(names)


def _rows(axes: Any, names: Mapping[str, Any], label: str) -> None:
    """Names the bars of a chart, the first one at the top."""
    axes.set_yticks(range(len(names)), [_folded(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)


def _legend(figure: Any, axes: Any, columns: int) -> None:
    """Puts the legend below, in as many columns as the figure is wide enough for, and makes the figure higher."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(columns, 84 // (8 + max(map(len, labels)))))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns)
