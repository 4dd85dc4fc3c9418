"""What a round's trees may cost, as whoever plans the rounds sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longdraft.sequence import Sequence
    from longdraft.trees.tree import TokenTree

# Told sequences, and what is proposed for each at no cost: those whose drafts are worth their forwards.
Choose = Callable[["list[Sequence]", "list[TokenTree]"], "list[Sequence]"]


def _all(sequences: list[Sequence], trees: list[TokenTree]) -> list[Sequence]:
    return sequences


@dataclass(frozen=True)
class Budget:
    """Bounds of the trees that a drafter grows in one round; it may stay below them.

    Attributes:
        nodes: drafted nodes of a tree that can be worth verifying.
        price: what one more draft forward costs, in expected tokens: a level that promises less is not worth it.
        choose: for which sequences to draft by forwards, told what is proposed without.
    """

    nodes: int
    price: float
    choose: Choose = _all


# Fitted to it, a kind is as large as a planner may ever want it: what memory is taken for.
LARGEST = Budget(nodes=sys.maxsize, price=0.0)
