"""TokenSwift's drafter, put together: the target on a part of its KV, chained heads, and phrases of the output.

root -> target on a view of its KV -> 1 token -> heads -> 3 tokens each, level by level     (1, 3, 3, 3)
root -> phrases of the output that began with it                                            one tree with these
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from longdraft.drafters.heads import HeadsDrafter
from longdraft.drafters.heads_draft import HeadsDraft
from longdraft.drafters.heads_reuse import PHRASE, PHRASES, ReuseDrafter
from longdraft.drafters.heads_self import ViewStates
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.united import UnitedDrafter
from longdraft.engine.drafter import Drafter

# In place of a view: no forward of the target drafts.
NO_VIEW = "none"


def tokenswift(
    draft: HeadsDraft,
    heads: int | None = None,
    widths: SequenceOf[int] | None = None,
    nodes: int | None = None,
    tree: str | None = None,
    depth: int | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
    view: str = "tokens",
    budget: int | None = None,
    sink: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    refresh: int | None = None,
    reuse: bool = True,
    reuse_n: int = PHRASE,
    reuse_k: int = PHRASES,
    view_dtype: str | None = None,
) -> Drafter:
    """TokenSwift's drafter (Wu et al. 2025, arXiv:2502.18890, section 3).

    Args:
        heads, widths, nodes, tree, depth, top_k, threshold: as :class:`~longdraft.drafters.heads.HeadsDrafter`
            takes them; the first of ``widths`` is the level that the
            target itself says, where it drafts. ``nodes`` counts those of the heads alone.
        view, budget, sink, window, chunk, refresh, view_dtype: what of its KV the target reads to draft, as
            :class:`~longdraft.drafters.self_drafter.SelfDrafter` takes them; "none": it does not draft, and the heads
            continue the state of the last verified token.
        reuse, reuse_n, reuse_k: whether phrases of the output are proposed too, their length and number.

    Raises:
        ValueError: a value that cannot be used.
    """
    if not isinstance(reuse, bool):
        raise ValueError(f"reuse must be True or False, got {reuse!r}")
    source = None
    if view != NO_VIEW:
        level = SelfDrafter(view, budget, sink, window, chunk, refresh, depth=1, view_dtype=view_dtype)
        source = ViewStates(level)
    else:
        sizes = {"budget": budget, "sink": sink, "window": window, "chunk": chunk, "refresh": refresh}
        if given := [name for name, value in (sizes | {"view_dtype": view_dtype}).items() if value is not None]:
            raise ValueError(f"{' and '.join(given)} shape a view of the KV: leave view={NO_VIEW} out, or them")
    own = HeadsDrafter(draft, heads, widths, nodes, tree, depth, top_k, threshold, source)
    phrases = ReuseDrafter(reuse_n, reuse_k)
    return UnitedDrafter(phrases, own) if reuse else own
