"""Beam tree: level by level, the most probable continuations of the level before (LongSpec, appendix E).

The first level holds the root's most probable tokens; each further one the best of (nodes of the level before x
vocabulary) by cumulative log-probability. The last level is never expanded: D levels cost D draft forwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longdraft.trees.level import Growth, Scored
from longdraft.trees.opt import FittedAsOpt

# LongSpec, appendix E.
WIDTHS = (4, 16, 16, 16, 16)
# For sampled text, as many nodes: the sampled token is often none of a few likeliest ones, so width helps and depth
# does not (docs/longspec.md).
SAMPLED_WIDTHS = (32, 24, 8, 4)


@dataclass(frozen=True, kw_only=True)
class Beam(FittedAsOpt):
    """A beam tree.

    Attributes:
        widths: nodes of each level; fewer if the vocabulary has no more.
        sampled_widths: the same for sampled text, no deeper than ``widths``; None: ``widths``.
    """

    widths: tuple[int, ...] = WIDTHS
    sampled_widths: tuple[int, ...] | None = None

    @property
    def depth(self) -> int:
        return len(self.widths)

    @property
    def candidates(self) -> int:
        return max(sum(self.widths), sum(self.sampled_widths or ()))

    @property
    def max_expanded(self) -> int:
        return max(sum(self.widths[:-1]), sum((self.sampled_widths or ())[:-1]))

    def levels(self, growth: Growth, roots: Scored) -> list[Scored]:
        last, levels = roots, []
        for width in (growth.sampled and self.sampled_widths) or self.widths:
            if not (going := growth.deeper(last.level)):
                break
            # At most `width` children of one node can be among the best, so the whole vocabulary is never sorted.
            last, _ = growth.children(last.kept(going), width).best(width)
            levels.append(last)
        return levels

    def limited(self, depth: int) -> Beam:
        sampled = self.sampled_widths and self.sampled_widths[:depth]
        return replace(self, widths=self.widths[:depth], sampled_widths=sampled)
