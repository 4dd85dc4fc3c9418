"""A chain: one continuation, ended where the draft grows unsure.

A node is accepted with about the probability that the draft gives its path, and one more level costs a draft forward
and a row of the verification. If all tokens are accepted at one rate `a`, this is MagicDec's choice of the length g
(Sadhukhan et al. 2024, section 3): the most tokens, (1 - a^(g+1)) / (1 - a), per time of g drafts and a verification.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

from longdraft.trees.kind import TreeKind
from longdraft.trees.level import Growth, Scored
from longdraft.trees.node_limit import NodeLimit

# Tokens of a chain by default (MagicDec's gamma), and at most if a planner ends it.
LENGTH, LONGEST = 4, 12


@dataclass(frozen=True, kw_only=True)
class Chain(TreeKind):
    """The draft's first choices.

    Attributes:
        depth: tokens at most.
        longest: tokens at most if a planner ends it.
        price: the chain ends with the first token whose path is no likelier than this.
    """

    depth: int = LENGTH
    longest: int = LONGEST
    price: float = 0.0

    @property
    def candidates(self) -> int:
        return self.depth

    @property
    def max_expanded(self) -> int:
        return self.depth - 1

    def levels(self, growth: Growth, roots: Scored) -> list[Scored]:
        last, levels = roots, []
        going = growth.deeper(last.level)
        while going:
            last = growth.children(last.kept(going), 1)
            levels.append(last)
            going = growth.deeper(last.level)
            if self.price > 0 and going:
                likely = dict(zip(last.level.rows, last.scores[:, 0].tolist(), strict=True))
                going = [row for row in going if likely[row] > log(self.price)]
        return levels

    def limited(self, depth: int) -> Chain:
        return replace(self, depth=min(self.depth, depth), longest=min(self.longest, depth))

    def _fit(self, limit: NodeLimit) -> Chain:
        return replace(self, depth=max(1, min(self.longest, limit.nodes)), price=limit.price)
