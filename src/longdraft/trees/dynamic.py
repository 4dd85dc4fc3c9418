"""Dynamic tree: wide where the draft hesitates, deep where it is sure (EAGLE-2, section 4; EAGLE-3 keeps it).

The root's ``top_k`` most probable tokens are the first level. Each further level has ``top_k`` children of each of the
``top_k`` best nodes before it, and all of them are candidates. The best candidates of all levels by cumulative
log-probability are verified; they are closed under parents, for a score only falls along a path. Unlike in a beam tree,
a child that is never expanded can be verified. The last level is never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longdraft.trees.level import Growth, Scored
from longdraft.trees.opt import FittedAsOpt

# EAGLE-3's: its 60 nodes count the root, which ``nodes`` does not.
DEPTH, TOP_K, NODES = 8, 10, 59


@dataclass(frozen=True, kw_only=True)
class Dynamic(FittedAsOpt):
    """A dynamic tree.

    Attributes:
        depth: levels.
        top_k: nodes of a level that are expanded, and children of each.
        nodes: drafted nodes of a tree; None: all candidates.
    """

    depth: int = DEPTH
    top_k: int = TOP_K
    nodes: int | None = NODES

    @property
    def candidates(self) -> int:
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def max_expanded(self) -> int:
        return (self.depth - 1) * self.top_k

    def levels(self, growth: Growth, roots: Scored) -> list[Scored]:
        expanded, levels = roots, []
        # (B', W): the places of the expanded nodes among the candidates of their level.
        places = roots.level.parents
        while going := growth.deeper(expanded.level):
            places = expanded.level.of(going, places)
            candidates = growth.children(expanded.kept(going), self.top_k)
            level = candidates.level
            levels.append(replace(candidates, level=replace(level, parents=places.gather(1, level.parents))))
            expanded, places = candidates.best(self.top_k)
        return levels

    def limited(self, depth: int) -> Dynamic:
        return replace(self, depth=min(self.depth, depth))
