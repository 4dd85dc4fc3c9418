"""The views that a model drafts on for itself, by their options."""

from __future__ import annotations

from dataclasses import dataclass

from longdraft.options import Options, option
from longdraft.views.scorers import SCORERS
from longdraft.views.view import DTYPES, View, check_sizes

BUDGET = 512
# StreamingLLM's first tokens, which MagicDec and TokenSwift take over.
SINK = 16
# SnapKV's window, whose queries choose (MagicDec, section 4).
WINDOW = 32
# TriForce, section 4.1.
CHUNK = 8
# Rows of a window that no text leaves.
EVERYTHING = 2**40
# View -> its scorer, and the rows that it chooses together; None: there is nothing to choose, or only single rows.
VIEWS: dict[str, tuple[str, int | None]] = {
    "all": ("streaming", None),
    "streaming": ("streaming", None),
    "snapkv": ("snapkv", 1),
    "chunks": ("mean-key", CHUNK),
    "tokens": ("tokens", None),
    "minmax": ("minmax", CHUNK),
    "quest": ("quest", CHUNK),
    "attention": ("attention", CHUNK),
    "mean-key": ("mean-key", CHUNK),
}


@dataclass(frozen=True)
class ViewOptions(Options):
    """The part of its KV that a model drafts on. None: not given."""

    budget: int | None = option(
        min=1, help="KV rows of each layer and head, sink and window included", usual="512; 2048 of view=attention"
    )
    sink: int | None = option(min=0, help="first rows, always seen", usual="16")
    window: int | None = option(
        min=1, help="last rows, always seen", usual="32; of view=streaming all that the budget leaves"
    )
    chunk: int | None = option(min=1, help="rows that are chosen together", usual="8; 1 of snapkv and tokens")
    refresh: int | None = option(
        min=0,
        help="verifications from one choice to the next; 0: only when the view has no room for new rows",
        usual="8; 16 of snapkv",
    )
    view_dtype: str | None = option(
        choices=tuple(DTYPES), help="what the view's keys and values are rounded to", usual="int8 of all and attention"
    )


def self_view(view: str, budget: int | None, sink: int | None, window: int | None, chunk: int | None) -> View:
    """A view from a drafter's options, None for those that were not given.

    Args:
        view: one of :data:`VIEWS`; "all" has no sizes.
        budget: rows, sink and window among them; 512 by default, of "streaming" with a window as many as that makes.
        sink: 16 by default, or as many of the first chunks as hold so many.
        window: 32 by default; with "streaming", all that the budget leaves.
        chunk: 8 by default, 1 with "snapkv"; not of "streaming" or "tokens".

    Raises:
        ValueError: no such view, sizes that make none, or sizes of a view without.
    """
    if view == "all":
        sizes = {"budget": budget, "sink": sink, "window": window, "chunk": chunk}
        if given := [name for name, size in sizes.items() if size is not None]:
            raise ValueError(f"view=all sees all rows: leave {' and '.join(given)} out, or take another view")
        return View("streaming", 0, 0, EVERYTHING)
    if view not in VIEWS:
        *others, last = VIEWS
        raise ValueError(f"view must be {', '.join(others)} or {last}, got {view!r}")
    scorer, usual = VIEWS[view]
    if chunk is not None and usual is None:
        raise ValueError(f"chunk shapes views that choose chunks, such as view=chunks, and not view={view}")
    size = chunk if chunk is not None else usual or 1
    check_sizes(1, chunk=size)
    sink = -(-SINK // size) * size if sink is None else sink
    check_sizes(0, sink=sink)
    streaming = SCORERS[scorer] is None
    if budget is None:
        budget = sink + window if streaming and type(window) is int else BUDGET
    # What is too small is refused for what it is, not for the window that nobody gave.
    usual_window = max(budget - sink, 1) if streaming and type(budget) is int else WINDOW
    window = usual_window if window is None else window
    check_sizes(1, budget=budget, window=window)
    least = sink + window + (size if size > 1 else 0)
    if budget < least:
        raise ValueError(
            f"budget must be at least sink + window{' + chunk' if size > 1 else ''} ({least} tokens), got {budget}: "
            "give a larger budget, or a smaller sink and window"
        )
    reduction = "mean" if scorer == "snapkv" else "last"
    return View(scorer, budget - sink - window, sink, window, size, reduction=reduction)
