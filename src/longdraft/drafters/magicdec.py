"""MagicDec's drafters: the target or a small language model, on a part of its KV, with a chain (Sadhukhan et al. 2024).

The view's size is fixed, so a draft forward costs the same at any length, and beside a large batch or a long text it
costs ever less of a verification. How long a chain pays follows from that: with a planner, each ends where another
token would promise less than its time is worth.
"""

from __future__ import annotations

from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.self_small_lm import SparseLMDrafter
from longdraft.drafters.self_views import BUDGET, self_view
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafters.small_lm_draft import SmallLMDraft
from longdraft.engine.drafter import Drafter
from longdraft.trees.chain import LONGEST
from longdraft.trees.options import tree_kind
from longdraft.views.compact import fresh_room

VIEWS = ("streaming", "snapkv")


def magicdec_self(
    view: str = "snapkv",
    budget: int | None = None,
    sink: int | None = None,
    window: int | None = None,
    refresh: int | None = None,
    depth: int | None = None,
    view_dtype: str | None = None,
) -> SelfDrafter:
    """The target drafts for itself.

    Args:
        view, budget, sink, window, refresh, view_dtype: as :class:`~longdraft.drafters.self_drafter.SelfDrafter` takes
            them.
        depth: tokens of the chain (the paper's gamma); None: 4, and with a planner as many as pay.

    Raises:
        ValueError: another view, or sizes that make none.
    """
    _check(view)
    return SelfDrafter(view, budget, sink, window, refresh=refresh, depth=depth, view_dtype=view_dtype)


def magicdec_small_lm(
    draft: SmallLMDraft,
    view: str = "snapkv",
    budget: int | None = None,
    sink: int | None = None,
    window: int | None = None,
    refresh: int | None = None,
    depth: int | None = None,
    view_dtype: str | None = None,
) -> Drafter:
    """A small language model drafts.

    Its streaming view lies at positions that it was trained on (:class:`~longdraft.drafters.small_lm.SmallLMDrafter`),
    SnapKV's at the text's.

    Args:
        budget: with "streaming" 512, or as many as it was trained for.
        view_dtype: of "snapkv" alone: a streaming view's rows are moved, and rounding would add up.
        others: as of :func:`magicdec_self`.

    Raises:
        ValueError: another view, sizes that make none, or more than the draft was trained for; ``view_dtype`` with
            "streaming".
    """
    _check(view)
    if view == "snapkv":
        return SparseLMDrafter(
            draft, view=view, budget=budget, sink=sink, window=window, refresh=refresh, depth=depth,
            view_dtype=view_dtype,
        )  # fmt: skip
    if view_dtype is not None:
        raise ValueError("view_dtype is of view=snapkv where a small language model drafts: leave it out")
    chain = tree_kind("chain", depth=depth)
    longest = max(LONGEST, chain.depth)
    if budget is None and window is None:
        budget = min(BUDGET, draft.trained_length - longest - fresh_room(longest))
    sizes = self_view(view, budget, sink, window, None)
    # Made for the longest chain that a planner may want.
    made = SmallLMDrafter(draft, tree="chain", depth=longest, view=view, sink=sizes.sink, recent=sizes.window)
    made.tree = chain
    return made


def _check(view: str) -> None:
    if view not in VIEWS:
        raise ValueError(f"view must be {' or '.join(VIEWS)}, got {view!r}: method self has others")
