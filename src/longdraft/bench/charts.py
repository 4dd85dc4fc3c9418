"""Draws line charts of measurements with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from longdraft.errors import needs_extra

INK = "#1f2933"
# Colours that suit light and dark pages, and that colour-blind readers tell apart (after Okabe and Ito).
_COLOURS = ("#1d87c9", "#dd6b20", "#12a37c", "#c465a0", "#c4931b", "#7a86dc")
_MARKERS = "os^DvPX"
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "longdraft",  # ids do not change from run to run
    "text.parse_math": False,  # names may contain dollar signs
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.35,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "xtick.color", "ytick.color", "axes.labelcolor"), INK),
}


class Point(NamedTuple):
    """A point of a line."""

    x: float
    y: float
    error: float  # half the length of the error bar


def check_available() -> None:
    """Raises CapabilityError if matplotlib is not installed."""
    with needs_extra("report", "Charts need the package matplotlib"):
        import matplotlib  # noqa: F401


def plot(title: str, series: Mapping[str, Sequence[Point]], x_label: str, y_label: str, reference: float) -> bytes:
    """Returns an SVG file: a line for each method over a logarithmic x axis. Leaves matplotlib's settings as they are.

    Args:
        series: by method, the points of its line, at least one.
        reference: y of a thin horizontal line, such as 1 for plain decoding.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    xs = sorted({point.x for points in series.values() for point in points})
    svg = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.0, 3.0), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium", fontweight="bold")
        axes = figure.add_subplot()
        axes.set_xscale("log")
        axes.set_xticks(xs, [f"{x:,.0f}" for x in xs])
        axes.xaxis.set_minor_locator(NullLocator())
        for i, (name, points) in enumerate(series.items()):
            # Each method is shifted by 1 % of the axis against the next, so that no error bar hides another.
            shift = (xs[-1] / xs[0]) ** (0.01 * (i - (len(series) - 1) / 2))
            axes.errorbar(
                [shift * point.x for point in points], [point.y for point in points],
                yerr=[point.error for point in points], label=name,
                color=_COLOURS[i % len(_COLOURS)], marker=_MARKERS[i % len(_MARKERS)],
            )  # fmt: skip
        axes.axhline(reference, color=INK, linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        # 84 characters fit a line of the legend, and an entry's marker takes the space of 8. Each line of the legend
        # adds its height (0.2 inches) to the figure.
        handles, labels = axes.get_legend_handles_labels()
        columns = max(1, min(3, 84 // (8 + max(map(len, labels)))))
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
        figure.legend(handles, labels, loc="outside lower left", ncols=columns)
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(svg, format="svg", bbox_inches="tight", pad_inches=0.06, metadata=metadata, facecolor="white")
    return svg.getvalue()
