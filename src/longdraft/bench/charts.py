"""Charts of measurements, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from longdraft.errors import CapabilityError

INK = "#1f2933"
# Colours that read on a light and on a dark page, and that colour-blind readers tell apart (after Okabe and Ito).
_COLOURS = ("#1d87c9", "#dd6b20", "#12a37c", "#c465a0", "#c4931b", "#7a86dc")
_MARKERS = "os^DvPX"
_GREY = "#89939e"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "longdraft",
    "text.parse_math": False,  # a name with dollars in it is a name
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.35,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "xtick.color", "ytick.color", "axes.labelcolor"), INK),
}


class Point(NamedTuple):
    """A value of one method: its place on the x axis, the value, and its lowest and highest if it sums up several."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


def available() -> None:
    """Raises CapabilityError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CapabilityError(
            "Charts need matplotlib, which is not installed: pip install 'longdraft[report]'."
        ) from None


def image(make: Callable[[], Any], transparent: bool = False) -> bytes:
    """A figure as an SVG file, on white or on nothing; the settings of matplotlib are the user's again afterwards.

    Args:
        make: makes the figure.
    """
    available()
    import matplotlib

    out = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    ground = {"transparent": True} if transparent else {"facecolor": "white"}
    with matplotlib.rc_context(_STYLE):
        make().savefig(out, format="svg", bbox_inches="tight", pad_inches=0.06, metadata=metadata, **ground)
    return out.getvalue()


def inline(make: Callable[[], Any]) -> str:
    """A figure as an SVG element for a page: transparent, its text in the page's colour."""
    text = image(make, transparent=True).decode()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def lines(
    title: str,
    series: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    reference: float | None = None,
    grey: Collection[str] = (),
    dotted: Collection[str] = (),
) -> Any:
    """A figure with a line for each method, x logarithmic.

    Args:
        series: the points of each method, one at least.
        reference: a value to draw a thin line at.
        grey: methods that the others are measured against.
        dotted: a line that goes with the method before it, in its colour.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    xs = sorted({point.x for points in series.values() for point in points})
    figure = Figure(figsize=(6.0, 3.0), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium", fontweight="bold")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_xticks(xs, [f"{x:,.0f}" for x in xs])
    axes.xaxis.set_minor_locator(NullLocator())
    style: dict[str, Any] = {}
    for i, (name, points) in enumerate(series.items()):
        colour = _GREY if name in grey else _COLOURS[i % len(_COLOURS)]
        own = {"color": colour, "marker": _MARKERS[i % len(_MARKERS)], "linestyle": "-"}
        style = style | {"marker": "_", "linestyle": ":"} if name in dotted else own
        # Side by side on the axis, so that no spread hides another.
        beside = (xs[-1] / xs[0]) ** (0.01 * (i - (len(series) - 1) / 2))
        spreads = [
            [max(0.0, 0.0 if end is None else sign * (end - point.y)) for point in points for end in [point[place]]]
            for sign, place in ((-1, 2), (1, 3))
        ]
        axes.errorbar([beside * p.x for p in points], [p.y for p in points], yerr=spreads, label=name, **style)
    if reference is not None:
        axes.axhline(reference, color=INK, linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    # The legend stands below, as high as it needs.
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(3, 84 // (8 + max(map(len, labels)))))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    return figure
