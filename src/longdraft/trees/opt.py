"""OPT-Tree: the tree with the longest expected acceptance by the draft's probabilities (Wang et al. 2025, section 3).

A node is accepted with about the probability that the draft gives its path, so a tree's expected accepted length is the
sum of its nodes' path probabilities, and the best tree of N nodes holds the N most probable paths. The root's N most
probable tokens are the first level; the children of a level's nodes are the next level's candidates. Drafting goes on
while a level makes the expectation of the best N so far longer by more than a threshold: the price of a draft forward
in tokens. So a tree is wide where the draft hesitates, and deep where it is sure.

A node that is not better than the N-th best candidate so far has no descendant among the best, and need not be
expanded. The host decides which trees go on, and how many nodes are expanded. A GPU does not wait for that: while it
computes a level, the host reads what the level before it promised. So a tree there may have one level more than it
would elsewhere, and expands as many nodes as it may.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from longdraft.attention.transfer import Fetched
from longdraft.trees.kind import TreeKind
from longdraft.trees.level import Growth, Scored
from longdraft.trees.node_limit import NodeLimit

# SpecExtend, appendix D.
NODES, DEPTH, THRESHOLD = 50, 10, 0.7
# Nodes of a level that are expanded at most; the paper expands as many as the tree has.
TOP_K = 10


@dataclass(frozen=True, kw_only=True)
class Opt(TreeKind):
    """An OPT-Tree.

    Attributes:
        nodes: drafted nodes of a tree.
        depth: levels at most.
        threshold: tokens by which a level has to lengthen the expected acceptance for another one to follow.
        top_k: nodes of a level that are expanded at most; with ``nodes``, the paper's number, nothing is missed.
    """

    nodes: int = NODES
    depth: int = DEPTH
    threshold: float = THRESHOLD
    top_k: int = TOP_K

    @property
    def candidates(self) -> int:
        return self.nodes * self.depth

    @property
    def max_expanded(self) -> int:
        return (self.depth - 1) * min(self.top_k, self.nodes)  # no level has more than the tree

    def levels(self, growth: Growth, roots: Scored) -> list[Scored]:
        expanded, levels = roots, []
        # (B', up to N) scores of the best candidates so far, the best first.
        best = roots.scores[:, :0]
        expected = [0.0] * len(roots.level.rows)
        going = growth.deeper(roots.level)
        ahead, waiting = best.device.type != "cpu", None
        while going:
            best = expanded.level.of(going, best)
            level, _ = growth.children(expanded.kept(going), self.nodes).best(self.nodes)
            levels.append(level)
            if not (deeper := growth.deeper(level.level)):
                break
            best = torch.cat([best, level.scores], dim=1)
            best = best.topk(min(self.nodes, best.shape[1]), dim=-1).values
            # With fewer candidates than nodes, all of them may have children among the best.
            promising = level.scores > (best[:, -1:] if best.shape[1] == self.nodes else float("-inf"))
            promised = going, Fetched(torch.stack([best.exp().sum(1), promising.float().sum(1)]))
            read, waiting = (waiting, promised) if ahead else (promised, None)
            if read is None:  # the first level of a GPU
                going, expanded = deeper, level.first(self.top_k)
                continue
            results = dict(zip(read[0], zip(*read[1].read(), strict=True), strict=True))
            going, width = [], self.top_k if ahead else 0
            for row in deeper:
                length, count = results[row]
                if count and length - expected[row] > self.threshold:
                    going.append(row)
                    width = max(width, min(self.top_k, int(count)))
                expected[row] = length
            expanded = level.first(width)
        return levels

    def limited(self, depth: int) -> Opt:
        return replace(self, depth=min(self.depth, depth))

    def _fit(self, limit: NodeLimit) -> Opt:
        return replace(self, nodes=max(1, min(self.nodes, limit.nodes)), threshold=limit.price)


class FittedAsOpt(TreeKind):
    """A kind in whose place a planner grows an OPT-Tree, no deeper and with no more nodes."""

    def _fit(self, limit: NodeLimit) -> Opt:
        return Opt(depth=self.depth, nodes=min(self.max_nodes, NODES))._fit(limit)
