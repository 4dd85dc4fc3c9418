"""SpecPV's options, and its entry in the catalogue (Tan et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longdraft.engine.method import Method, register
from longdraft.engine.partial import SpecPV, partial_view
from longdraft.options import Options, option, parse, takes
from longdraft.views.scorers import SCORERS
from longdraft.views.view import DTYPES, dtype_of


@dataclass(frozen=True)
class PartialOptions(Options):
    """The partial KV that SpecPV verifies on (section 3.2).

    Drafters take their options from the same words as the schedule: names differ where values may (``block``,
    ``selector``), and are shared where one value suits both (``sink``, ``recent``).
    """

    budget: int = option(1024, min=1, help="KV rows that are chosen from the text")
    selector: str = option("minmax", choices=tuple(SCORERS), help="how blocks are ranked")
    reduction: str = option("mean", choices=("mean", "max", "last"), help="how scores of several queries become one")
    margin: int = option(20, min=0, help="rows beyond a tree that a partial round leaves free before a full pass")
    sink: int = option(32, min=0, help="first rows, always seen")
    recent: int = option(128, min=1, help="last rows, always seen")
    block: int = option(16, min=1, help="rows that are chosen together")
    view_dtype: str | None = option(
        choices=tuple(DTYPES), help="what the partial KV is rounded to", usual="not rounded"
    )


@takes(PartialOptions)
def _schedule(**options: Any) -> SpecPV:
    (o,) = parse("SpecPV", options, PartialOptions)
    view = partial_view(o.budget, o.sink, o.recent, o.block, o.margin, o.selector, o.reduction)
    return SpecPV(view, dtype_of(o.view_dtype))


register(
    Method(
        "specpv",
        False,
        "Tan et al. 2025, SpecPV, arXiv:2512.02337",
        "verifies on the part of a long context that matters, and on all of it every few rounds; any drafter",
        schedule=_schedule,
    )
)
