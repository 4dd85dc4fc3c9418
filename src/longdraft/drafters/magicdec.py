"""MagicDec: the target or a small language model drafts a chain on a part of its KV (Sadhukhan et al. 2024).

The view's size is fixed, so a draft forward costs the same at any length, and ever less compared with a verification
of a large batch or a long text. With a planner, a chain ends where another token would not be worth its time.

A small language model drafts on a streaming view of its own KV.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from longdraft.drafters.self_drafter import BUDGET, SelfDrafter, ViewOptions, self_view
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine.drafter import Drafter
from longdraft.engine.method import Method, register
from longdraft.options import option, parse, takes
from longdraft.trees.kind import LONGEST
from longdraft.trees.options import TreeOptions
from longdraft.views.draft_cache import fresh_room

VIEWS = ("streaming", "snapkv")
_PAPER = "Sadhukhan et al. 2024, MagicDec, arXiv:2408.11049"


@dataclass(frozen=True)
class MagicDecOptions(ViewOptions):
    """The view that a chain is drafted on."""

    view: str = option(
        "snapkv",
        choices=VIEWS,
        help="streaming: the first and last rows, all that a small model takes; snapkv: these and the best",
    )
    depth: int | None = option(
        min=1, help="tokens of the chain (the paper's gamma)", usual="4, planned: as many as pay"
    )


@takes(MagicDecOptions)
def magicdec_self(**options: Any) -> SelfDrafter:
    """The target drafts for itself.

    Raises:
        ValueError: another view, or sizes that make none.
    """
    (own,) = parse("magicdec", options, MagicDecOptions)
    return SelfDrafter(**own.given())


@takes(MagicDecOptions)
def magicdec_small_lm(draft: SmallLMDraft, **options: Any) -> Drafter:
    """A small language model drafts, at positions that it was trained on (:class:`SmallLMDrafter`).

    Its view's rows are moved, so they are not rounded: rounding would add up.

    Raises:
        ValueError: another view than streaming, more than the draft was trained for, or ``view_dtype``.
    """
    (own,) = parse("magicdec", {"view": "streaming"} | options, MagicDecOptions)
    if own.view != "streaming":
        raise ValueError("view=snapkv is of drafter=self: a small language model drafts on view=streaming")
    if own.view_dtype is not None:
        raise ValueError("view_dtype is of drafter=self: leave it out where a small language model drafts")
    chain = TreeOptions(tree="chain", depth=own.depth).kind("chain")
    chain = replace(chain, chosen_by_user=own.depth is not None)
    longest = max(LONGEST, chain.depth)
    budget = own.budget
    if budget is None and own.window is None:
        budget = min(BUDGET, draft.trained_length - longest - fresh_room(longest))
    sizes = self_view(own.view, budget, own.sink, own.window, own.chunk)
    # Made for the longest chain that a planner may want.
    drafter = SmallLMDrafter(draft, tree="chain", depth=longest, view=own.view, sink=sizes.sink, recent=sizes.window)
    drafter.tree = chain
    return drafter


register(
    Method(
        "magicdec",
        True,
        _PAPER,
        "the model itself or a small language model drafts a chain, on a part of its KV cache; for large batches",
        draft_kind="small-lm",
        drafters=(
            Method("self", True, _PAPER, "", magicdec_self),
            Method("small-lm", True, _PAPER, "", magicdec_small_lm, "small-lm"),
        ),
    )
)
