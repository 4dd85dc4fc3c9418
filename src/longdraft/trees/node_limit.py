"""A planner's limit on the trees of a round."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longdraft.trees.tree import TokenTree

# (sequences, a tree for each that cost nothing) -> the sequences for which forwards of the draft are worthwhile.
Choose = Callable[[list[Any], list[TokenTree]], list[Any]]


def _all(sequences: list[Any], trees: list[TokenTree]) -> list[Any]:
    return sequences


@dataclass(frozen=True)
class NodeLimit:
    """Bounds of the trees that a drafter grows in one round; it may stay below them.

    Attributes:
        nodes: drafted nodes of a tree that can be worth verifying.
        price: cost of one more draft forward in expected tokens: a level that promises less is not worthwhile.
        choose: selects the sequences to draft for by forwards, given what is proposed without.
    """

    nodes: int
    price: float
    choose: Choose = _all


# A kind fitted to this limit is as large as a planner may ever want it; memory is taken for that.
LARGEST = NodeLimit(nodes=sys.maxsize, price=0.0)
