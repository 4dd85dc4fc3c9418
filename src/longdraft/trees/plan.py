"""Which tree a draft grows: a method's options, checked, and what the drafter has to know beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from longdraft.trees import opt as opt_tree
from longdraft.trees.beam import Expand, beam, best_nodes
from longdraft.trees.budget import Budget
from longdraft.trees.chain import LENGTH, LONGEST, chain_of
from longdraft.trees.dynamic import DEPTH, NODES, TOP_K, dynamic
from longdraft.trees.full import Draws, full, sizes
from longdraft.trees.full import drawn as by_chance
from longdraft.trees.tree import TokenTree

# LongSpec, section 4.1.
WIDTHS = (4, 16, 16, 16, 16)
# As many nodes for text that is drawn: what is drawn is often none of a few likeliest tokens, so width tells and depth
# does not (docs/longspec.md).
DRAWN_WIDTHS = (32, 24, 8, 4)
# TokenSwift, but for its first level, which is the target's own token.
STATIC = (3, 3, 3)
KINDS = ("chain", "static", "beam", "dynamic", "opt")
_WIDE = ("beam", "static")  # take widths
# How drawn text is accepted: one draw from the target a node, or by what the drafter drew its tokens from.
ACCEPTANCES = ("draw", "residual")


@dataclass(frozen=True)
class TreePlan:
    """A kind of tree with its sizes.

    Attributes:
        widths: nodes of each level of a beam tree, or children of each node of a static one; None: the tree is a
            dynamic one, an OPT-Tree or a chain.
        depth, top_k: of a dynamic tree or an OPT-Tree; of a chain, its length and 0.
        nodes: verify only this many drafted nodes, the most probable; None: all, which an OPT-Tree does not know.
        drawn_widths: of a beam tree where tokens are drawn, not picked greedily; None: ``widths``.
        threshold: of an OPT-Tree; None: the tree is not one.
        asked: whether it was chosen, not left to us.
        chain, static: whether it is one. sampled: whether a static tree is drawn by chance where the target's tokens
            are.
    """

    widths: tuple[int, ...] | None
    depth: int
    top_k: int
    nodes: int | None
    drawn_widths: tuple[int, ...] | None = None
    threshold: float | None = None
    asked: bool = False
    chain: bool = False
    static: bool = False
    sampled: bool = False

    def adaptive(self) -> TreePlan:
        """The plan for a planner, which wants trees of any size: an OPT-Tree no deeper, unless a tree was asked for.

        A chain stays one, and ends where it does not pay to go on.
        """
        if self.asked or self.threshold is not None:
            return self
        if self.chain:
            return replace(self, depth=max(self.depth, LONGEST))
        top_k = min(self.top_k or opt_tree.TOP_K, opt_tree.TOP_K)
        nodes = min(self.max_nodes, opt_tree.NODES)
        return TreePlan(None, self.depth, top_k, nodes, threshold=opt_tree.THRESHOLD)

    @property
    def max_nodes(self) -> int:
        """Largest number of drafted nodes of a tree."""
        if self.threshold is not None:
            every = self.nodes or opt_tree.NODES
        elif self.chain:
            every = self.depth
        elif self.widths is None:
            every = self.top_k + (self.depth - 1) * self.top_k**2
        elif self.static:
            every = sum(sizes(self.widths))
        else:
            every = max(sum(self.widths), sum(self.drawn_widths or ()))
        return min(every, self.nodes or every)

    @property
    def shown(self) -> int:
        """Nodes that the draft is shown in a round, the root not counted."""
        if self.chain:
            return self.depth - 1
        if self.widths is None:
            return (self.depth - 1) * self.top_k
        if self.static:
            return sum(sizes(self.widths[:-1]))
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
        draws: Sequence[Draws | None] = (),
    ) -> list[TokenTree]:
        """A tree for each root, of at most these depths; :func:`beam`, :func:`dynamic` and :func:`opt` say the rest.

        Args:
            drawn: the target's tokens are drawn, not picked greedily.
            budget: sizes of an OPT-Tree or a chain that nobody asked for otherwise; other trees keep their own.
            draws: of each sequence, for a tree that is drawn by chance; without, it is one of likeliest tokens.
        """
        if self.chain:
            length, price = self.max_nodes, 0.0
            if budget is not None and not self.asked:
                length, price = max(1, min(length, budget.nodes)), budget.price
            return chain_of(roots, expand, [min(length, d) for d in depths], price, ids=ids, device=device)
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
        if self.static:
            chances = [each for each in draws if each is not None] if self.sampled else []
            if chances:
                return by_chance(roots, expand, self.widths, chances, depths, ids=ids, device=device)
            grown = full(roots, expand, self.widths, depths, ids=ids, device=device)
            return [best_nodes(tree, self.nodes) for tree in grown]
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
    acceptance: str = "draw",
) -> TreePlan:
    """A plan from a method's options, None for those that were not given.

    Args:
        default: kind of tree where neither ``tree`` nor an option of one kind says which.
        widths: nodes of each level of a beam tree; None: the paper's, and others of the same number for drawn text. Of
            a static tree, the children of each node, level by level.
        nodes: verify only this many drafted nodes, the root not counted; None: all of a beam tree or a chain, 59 of a
            dynamic tree, 50 of an OPT-Tree.
        tree: "chain", "beam", "dynamic", "opt" or "static"; None: what the options given are of, else ``default``.
        depth, top_k: of a dynamic tree or an OPT-Tree; ``depth`` of a chain too.
        threshold: of an OPT-Tree: tokens by which a level has to make the expected accepted length longer.
        acceptance: of drawn text: "draw", one draw from the target a node; or "residual", by what the draft drew its
            tokens from, which are a static tree, a chain of ``depth`` tokens where no ``widths`` are given.

    Raises:
        ValueError: sizes that make no tree, or options of two kinds together.
    """
    asked = any(value is not None for value in (widths, nodes, tree, depth, top_k, threshold))
    if acceptance not in ACCEPTANCES:
        raise ValueError(f"acceptance must be {' or '.join(ACCEPTANCES)}, got {acceptance!r}")
    if acceptance == "residual":
        return _sampled(widths, depth, {"nodes": nodes, "tree": tree, "top_k": top_k, "threshold": threshold})
    grown = {"depth": depth, "top_k": top_k}
    given = [name for name, value in grown.items() if value is not None]
    if tree is None:
        tree = _meant(default, widths is not None, top_k is not None, depth is not None, threshold is not None)
    if tree not in KINDS:
        raise ValueError(f"tree must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {tree!r}")
    if tree == "chain" and top_k is not None:
        raise ValueError("top_k shapes a dynamic tree or an opt tree; a chain takes depth")
    if tree in _WIDE and given:
        raise ValueError(f"{' and '.join(given)} shape a dynamic tree or an opt tree; a {tree} tree takes widths")
    if tree not in _WIDE and widths is not None:
        others = "depth" if tree == "chain" else "depth and top_k"
        raise ValueError(f"widths shape a beam tree; tree {tree!r} takes {others}")
    if tree != "opt" and threshold is not None:
        raise ValueError(f"threshold shapes an opt tree, not a {tree} one: give tree='opt', or leave it out")
    for name, value in (grown | {"nodes": nodes}).items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if threshold is not None and (type(threshold) not in (int, float) or not 0 <= threshold < float("inf")):
        raise ValueError(f"threshold must be a number of at least 0, got {threshold!r}")
    if tree == "chain":
        return TreePlan(None, depth or LENGTH, 0, nodes, asked=asked, chain=True)
    if tree == "dynamic":
        return TreePlan(None, depth or DEPTH, top_k or TOP_K, nodes or NODES, asked=asked)
    if tree == "opt":
        nodes = nodes or opt_tree.NODES
        threshold = opt_tree.THRESHOLD if threshold is None else threshold
        shown = min(top_k or opt_tree.TOP_K, nodes)  # no level of it has more
        return TreePlan(None, depth or opt_tree.DEPTH, shown, nodes, threshold=threshold, asked=asked)
    levels = _levels((STATIC if tree == "static" else WIDTHS) if widths is None else widths)
    if tree == "static":
        return TreePlan(levels, len(levels), 0, nodes, asked=asked, static=True)
    return TreePlan(levels, len(levels), 0, nodes, None if widths is not None else DRAWN_WIDTHS, asked=asked)


def _levels(widths: Sequence[int]) -> tuple[int, ...]:
    levels = tuple(widths)
    if not levels or min(levels) < 1:
        raise ValueError(f"widths must be numbers of nodes, one or more for each level, got {levels}")
    return levels


def _sampled(widths: Sequence[int] | None, depth: int | None, others: dict[str, object]) -> TreePlan:
    """A tree that is drawn by chance. Its shape is fixed: one that followed the draws would make them others."""
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(
            f"acceptance=residual draws a tree of a fixed shape: leave {' and '.join(given)} out, and give widths "
            "(children of a node, level by level) or depth (of a chain)"
        )
    if widths is not None and depth is not None:
        raise ValueError("widths and depth both say how deep a drawn tree is: give one of them")
    if depth is not None and (type(depth) is not int or depth < 1):
        raise ValueError(f"depth must be a whole number of at least 1, got {depth!r}")
    levels = _levels((1,) * (depth or LENGTH) if widths is None else widths)
    return TreePlan(levels, len(levels), 0, None, asked=True, static=True, sampled=True)


def _meant(default: str, widths: bool, top_k: bool, depth: bool, threshold: bool) -> str:
    """The kind of tree whose options were given: which of these were."""
    if widths:
        return "static" if default == "static" else "beam"
    if threshold:
        return "opt"
    grown = (depth and default in _WIDE) or (top_k and default in (*_WIDE, "chain"))
    return "dynamic" if grown else default
