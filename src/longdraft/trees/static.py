"""Static tree: all nodes of a level have the same number of children, their likeliest continuations (TokenSwift)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from longdraft.trees.level import Growth, Scored
from longdraft.trees.opt import FittedAsOpt

# TokenSwift's widths, without its first level, which is the target's own token.
WIDTHS = (3, 3, 3)


@dataclass(frozen=True, kw_only=True)
class Static(FittedAsOpt):
    """A tree of a fixed shape.

    Attributes:
        widths: children of each node, level by level; fewer where the vocabulary has no more.
    """

    widths: tuple[int, ...] = WIDTHS

    @property
    def depth(self) -> int:
        return len(self.widths)

    @property
    def candidates(self) -> int:
        return sum(accumulate(self.widths, mul))

    @property
    def max_expanded(self) -> int:
        return sum(accumulate(self.widths[:-1], mul))

    def levels(self, growth: Growth, roots: Scored) -> list[Scored]:
        last, levels = roots, []
        for width in self.widths:
            if not (going := growth.deeper(last.level)):
                break
            last = growth.children(last.kept(going), width)
            levels.append(last)
        return levels

    def limited(self, depth: int) -> Static:
        return replace(self, widths=self.widths[:depth])
