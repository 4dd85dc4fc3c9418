"""Which tree a draft grows: a method's options, checked, and what the drafter has to know beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from longdraft.trees import opt as opt_tree
from longdraft.trees.beam import Expand, beam
from longdraft.trees.budget import Budget
from longdraft.trees.dynamic import DEPTH, NODES, TOP_K, dynamic
from longdraft.trees.tree import TokenTree

# LongSpec, section 4.1.
WIDTHS = (4, 16, 16, 16, 16)
# As many nodes for text that is drawn: what is drawn is often none of a few likeliest tokens, so width tells and depth
# does not (docs/longspec.md).
DRAWN_WIDTHS = (32, 24, 8, 4)
KINDS = ("beam", "dynamic", "opt")


@dataclass(frozen=True)
class TreePlan:
    """A kind of tree with its sizes.

    Attributes:
        widths: nodes of each level of a beam tree; None: the tree is a dynamic one or an OPT-Tree.
        depth, top_k: of a dynamic tree or an OPT-Tree.
        nodes: verify only this many drafted nodes, the most probable; None: all, which an OPT-Tree does not know.
        drawn_widths: of a beam tree where tokens are drawn, not picked greedily; None: ``widths``.
        threshold: of an OPT-Tree; None: the tree is not one.
        asked: whether it was chosen, not left to us.
    """

    widths: tuple[int, ...] | None
    depth: int
    top_k: int
    nodes: int | None
    drawn_widths: tuple[int, ...] | None = None
    threshold: float | None = None
    asked: bool = False

    def adaptive(self) -> TreePlan:
        """The plan for a planner, which wants trees of any size: an OPT-Tree no deeper, unless a tree was asked for."""
        if self.asked or self.threshold is not None:
            return self
        top_k = min(self.top_k or opt_tree.TOP_K, opt_tree.TOP_K)
        nodes = min(self.max_nodes, opt_tree.NODES)
        return TreePlan(None, self.depth, top_k, nodes, threshold=opt_tree.THRESHOLD)

    @property
    def max_nodes(self) -> int:
        """Largest number of drafted nodes of a tree."""
        if self.threshold is not None:
            every = self.nodes or opt_tree.NODES
        elif self.widths is None:
            every = self.top_k + (self.depth - 1) * self.top_k**2
        else:
            every = max(sum(self.widths), sum(self.drawn_widths or ()))
        return min(every, self.nodes or every)

    @property
    def shown(self) -> int:
        """Nodes that the draft is shown in a round, the root not counted."""
        if self.widths is None:
            return (self.depth - 1) * self.top_k
        return max(sum(self.widths[:-1]), sum((self.drawn_widths or ())[:-1]))

    def grow(
        self,
        roots: Sequence[int],
        expand: Expand,
        depths: Sequence[int],
        ids: torch.Tensor | None,
        device: torch.device | str,
        drawn: bool = False,
        budget: Budget | None = None,
    ) -> list[TokenTree]:
        """A tree for each root, of at most these depths; :func:`beam`, :func:`dynamic` and :func:`opt` say the rest.

        Args:
            drawn: the target's tokens are drawn, not picked greedily.
            budget: sizes of an OPT-Tree that nobody asked for otherwise; other trees keep their own.
        """
        if budget is not None and self.threshold is not None and not self.asked:
            nodes = max(1, min(self.max_nodes, budget.nodes))
            self = replace(self, nodes=nodes, top_k=min(self.top_k, nodes), threshold=budget.price)
        depths = [min(self.depth, d) for d in depths]
        if self.threshold is not None:
            return opt_tree.opt(
                roots, expand, self.max_nodes, self.depth, self.threshold, self.top_k, depths, ids=ids, device=device
            )
        if self.widths is None:
            return dynamic(roots, expand, self.depth, self.top_k, depths, nodes=self.nodes, ids=ids, device=device)
        widths = (drawn and self.drawn_widths) or self.widths
        depths = [min(len(widths), d) for d in depths]
        return beam(roots, expand, widths, depths, nodes=self.nodes, ids=ids, device=device)


def tree_plan(
    default: str,
    widths: Sequence[int] | None = None,
    nodes: int | None = None,
    tree: str | None = None,
    depth: int | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
) -> TreePlan:
    """A plan from a method's options, None for those that were not given.

    Args:
        default: kind of tree where neither ``tree`` nor an option of one kind says which.
        widths: nodes of each level of a beam tree; None: the paper's, and others of the same number for drawn text.
        nodes: verify only this many drafted nodes, the root not counted; None: all of a beam tree, 59 of a dynamic one,
            50 of an OPT-Tree.
        tree: "beam", "dynamic" or "opt"; None: what the options given are of, else ``default``.
        depth, top_k: of a dynamic tree or an OPT-Tree.
        threshold: of an OPT-Tree: tokens by which a level has to make the expected accepted length longer.

    Raises:
        ValueError: sizes that make no tree, or options of two kinds together.
    """
    asked = any(value is not None for value in (widths, nodes, tree, depth, top_k, threshold))
    grown = {"depth": depth, "top_k": top_k}
    given = [name for name, value in grown.items() if value is not None]
    if tree is None:
        tree = _meant(default, widths is not None, bool(given), threshold is not None)
    if tree not in KINDS:
        raise ValueError(f"tree must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {tree!r}")
    if tree == "beam" and given:
        raise ValueError(f"{' and '.join(given)} shape a dynamic tree or an opt tree; a beam tree takes widths")
    if tree != "beam" and widths is not None:
        raise ValueError(f"widths shape a beam tree; tree {tree!r} takes depth and top_k")
    if tree != "opt" and threshold is not None:
        raise ValueError(f"threshold shapes an opt tree, not a {tree} one: give tree='opt', or leave it out")
    for name, value in (grown | {"nodes": nodes}).items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if threshold is not None and (type(threshold) not in (int, float) or not 0 <= threshold < float("inf")):
        raise ValueError(f"threshold must be a number of at least 0, got {threshold!r}")
    if tree == "dynamic":
        return TreePlan(None, depth or DEPTH, top_k or TOP_K, nodes or NODES, asked=asked)
    if tree == "opt":
        nodes = nodes or opt_tree.NODES
        threshold = opt_tree.THRESHOLD if threshold is None else threshold
        shown = min(top_k or opt_tree.TOP_K, nodes)  # no level of it has more
        return TreePlan(None, depth or opt_tree.DEPTH, shown, nodes, threshold=threshold, asked=asked)
    levels = WIDTHS if widths is None else tuple(widths)
    if not levels or min(levels) < 1:
        raise ValueError(f"widths must be numbers of nodes, one or more for each level, got {levels}")
    return TreePlan(levels, len(levels), 0, nodes, None if widths is not None else DRAWN_WIDTHS, asked=asked)


def _meant(default: str, widths: bool, grown: bool, threshold: bool) -> str:
    """The kind of tree whose options were given: whether widths, depth or top_k, and a threshold were."""
    if widths:
        return "beam"
    if threshold:
        return "opt"
    return "dynamic" if grown and default == "beam" else default
