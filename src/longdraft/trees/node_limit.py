"""How large the trees of a round may be, as a planner sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longdraft.trees.tree import TokenTree

# (sequences, a tree for each that cost nothing) -> the sequences whose drafts are worth their forwards.
Choose = Callable[[list[Any], list[TokenTree]], list[Any]]


def _all(sequences: list[Any], trees: list[TokenTree]) -> list[Any]:
    return sequences


@dataclass(frozen=True)
class NodeLimit:
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
LARGEST = NodeLimit(nodes=sys.maxsize, price=0.0)
