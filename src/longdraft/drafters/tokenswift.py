"""TokenSwift's drafter, put together: the target on a part of its KV, chained heads, and phrases of the output.

root -> target on a view of its KV -> 1 token -> heads -> 3 tokens each, level by level     (1, 3, 3, 3)
root -> phrases of the output that began with it                                            one tree with these
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longdraft.drafters.heads import HeadOptions, HeadsDrafter
from longdraft.drafters.heads_draft import HeadsDraft
from longdraft.drafters.heads_reuse import PHRASE, PHRASES, ReuseDrafter
from longdraft.drafters.heads_self import ViewStates
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.self_views import VIEWS, ViewOptions
from longdraft.drafters.united import UnitedDrafter
from longdraft.engine.drafter import Drafter
from longdraft.engine.method import Method, register
from longdraft.options import declared, option, parse, takes
from longdraft.trees.options import TreeOptions

# In place of a view: no forward of the target drafts.
NO_VIEW = "none"


@dataclass(frozen=True)
class TokenSwiftOptions(ViewOptions):
    """The target's own part of the drafts, and phrases of the output."""

    view: str = option(
        "tokens", choices=(*VIEWS, NO_VIEW), help="what of its KV the target drafts on; none: it does not"
    )
    reuse: bool = option(True, help="also propose phrases of the output")
    reuse_n: int = option(PHRASE, min=2, help="tokens of a phrase")
    reuse_k: int = option(PHRASES, min=1, help="phrases at most")


@takes(HeadOptions, TreeOptions, TokenSwiftOptions)
def tokenswift(draft: HeadsDraft, **options: Any) -> Drafter:
    """TokenSwift's drafter (Wu et al. 2025, arXiv:2502.18890, section 3).

    Args:
        options: of :class:`HeadOptions`, :class:`TreeOptions` (``nodes`` counts those of the heads alone; the first of
            ``widths`` is the level that the target itself drafts) and :class:`TokenSwiftOptions`.

    Raises:
        ValueError: a value that cannot be used.
    """
    heads, tree, own = parse("tokenswift", options, HeadOptions, TreeOptions, TokenSwiftOptions)
    sizes = {name: getattr(own, name) for name in declared(ViewOptions)}
    source = None
    if own.view != NO_VIEW:
        source = ViewStates(SelfDrafter(view=own.view, depth=1, **sizes))
    elif given := [name for name, value in sizes.items() if value is not None]:
        raise ValueError(f"{' and '.join(given)} shape a view of the KV: leave view={NO_VIEW} out, or them")
    trained = HeadsDrafter(draft, source, **heads.given(), **tree.given())
    return UnitedDrafter(ReuseDrafter(own.reuse_n, own.reuse_k), trained) if own.reuse else trained


register(
    Method(
        "tokenswift",
        True,
        "Wu et al. 2025, TokenSwift, arXiv:2502.18890",
        "the same heads, behind a forward of the model on a part of its KV cache, and phrases of the output",
        tokenswift,
        "heads",
    )
)
