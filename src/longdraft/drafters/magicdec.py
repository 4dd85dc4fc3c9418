"""MagicDec: the target drafts a chain on a part of its KV (Sadhukhan et al. 2024).

The view's size is fixed, so a draft forward costs the same at any length, and ever less compared with a verification
of a large batch or a long text. With a planner, a chain ends where another token would not be worth its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longdraft.drafters.self_drafter import SelfDrafter, ViewOptions
from longdraft.engine.method import Method, register
from longdraft.options import option, parse, takes


@dataclass(frozen=True)
class MagicDecOptions(ViewOptions):
    """The view that a chain is drafted on."""

    view: str = option(
        "snapkv",
        choices=("streaming", "snapkv"),
        help="streaming: the first and last rows; snapkv: these and the best",
    )
    depth: int | None = option(
        min=1, help="tokens of the chain (the paper's gamma)", usual="4, planned: as many as pay"
    )


@takes(MagicDecOptions)
def magicdec(**options: Any) -> SelfDrafter:
    """The target drafts for itself.

    Raises:
        ValueError: another view, or sizes that make none.
    """
    (own,) = parse("magicdec", options, MagicDecOptions)
    return SelfDrafter(**own.given())


register(
    Method(
        "magicdec",
        magicdec,
        "the model itself drafts a chain, on a part of its KV cache; for large batches",
        "Sadhukhan et al. 2024, MagicDec, arXiv:2408.11049",
    )
)
