"""What a round's trees may cost, as whoever plans the rounds sees it."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Bounds of the trees that a drafter grows in one round; it may stay below them.

    Attributes:
        nodes: drafted nodes of a tree that can be worth verifying.
        price: what one more draft forward costs, in expected tokens: a level that promises less is not worth it.
        paid: whether draft forwards are worth making at all; a drafter that needs none proposes all the same.
    """

    nodes: int
    price: float
    paid: bool = True


# Fitted to it, a kind is as large as a planner may ever want it: what memory is taken for.
LARGEST = Budget(nodes=sys.maxsize, price=0.0)
