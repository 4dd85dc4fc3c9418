"""Line charts of measurements, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from longdraft.errors import CapabilityError

INK = "#1f2933"
# Colours for light and dark pages, which colour-blind readers tell apart (after Okabe and Ito).
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
    """A point of a line, with the half length of its error bar."""

    x: float
    y: float
    error: float


def check_available() -> None:
    """Raises CapabilityError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CapabilityError("Charts need the package matplotlib: pip install 'longdraft[report]'.") from None


def plot(title: str, series: Mapping[str, Sequence[Point]], x_label: str, y_label: str, reference: float) -> bytes:
    """An SVG file with a line for each method over a logarithmic x axis. matplotlib's own settings do not change.

    Args:
        series: the points of each method, at least one.
        reference: y of a thin horizontal line, such as 1 for plain decoding.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    xs = sorted({point.x for points in series.values() for point in points})
    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.0, 3.0), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium", fontweight="bold")
        axes = figure.add_subplot()
        axes.set_xscale("log")
        axes.set_xticks(xs, [f"{x:,.0f}" for x in xs])
        axes.xaxis.set_minor_locator(NullLocator())
        for i, (name, points) in enumerate(series.items()):
            # Methods are shifted against each other, so that no error bar hides another.
            shift = (xs[-1] / xs[0]) ** (0.01 * (i - (len(series) - 1) / 2))
            axes.errorbar(
                [shift * p.x for p in points],
                [p.y for p in points],
                yerr=[p.error for p in points],
                label=name,
                color=_COLOURS[i % len(_COLOURS)],
                marker=_MARKERS[i % len(_MARKERS)],
            )
        axes.axhline(reference, color=INK, linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        # The legend has up to 3 columns (84 characters fit a line), and the figure grows by its height.
        handles, labels = axes.get_legend_handles_labels()
        columns = max(1, min(3, 84 // (8 + max(map(len, labels)))))
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
        figure.legend(handles, labels, loc="outside lower left", ncols=columns)
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", bbox_inches="tight", pad_inches=0.06, metadata=metadata, facecolor="white")
    return out.getvalue()
