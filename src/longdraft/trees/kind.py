"""Kinds of trees: their sizes, how they grow from a draft, and the sizes that a planner gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longdraft.trees.level import Expand, Foresee, Growth, Lift, Likeliest, Scored, root_level, to_trees
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class TreeKind(ABC):
    """A kind of tree with its sizes.

    Attributes:
        nodes: drafted nodes that are verified, the most probable ones; None: all.
        chosen_by_user: whether the user chose the tree, so that a planner leaves it as it is.
    """

    nodes: int | None = None
    chosen_by_user: bool = False

    @property
    @abstractmethod
    def depth(self) -> int:
        """Levels at most, and so forwards of the draft."""

    @property
    @abstractmethod
    def candidates(self) -> int:
        """Drafted nodes at most, before the most probable of them are chosen."""

    @property
    @abstractmethod
    def max_expanded(self) -> int:
        """Drafted nodes that the draft expands in a round at most: rows of KV that it needs for a tree."""

    @property
    def max_nodes(self) -> int:
        """Drafted nodes of a tree at most."""
        return min(self.candidates, self.nodes or self.candidates)

    @abstractmethod
    def levels(self, growth: Growth, roots: Scored) -> list[Scored]:
        """Runs the draft level by level; returns every level's candidates."""

    @abstractmethod
    def limited(self, depth: int) -> TreeKind:
        """Returns the same kind with at most ``depth`` levels."""

    @abstractmethod
    def _fit(self, limit: NodeLimit) -> TreeKind:
        """Returns the tree to grow within a planner's limit."""

    def fit(self, limit: NodeLimit | None) -> TreeKind:
        """Returns the tree to grow within a planner's limit; this one without a limit, or if the user chose it."""
        return self if limit is None or self.chosen_by_user else self._fit(limit)

    def grow(
        self,
        roots: Sequence[int],
        expand: Expand,
        depths: Sequence[int] | None = None,
        ids: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        *,
        sampled: bool = False,
        likeliest: Likeliest | None = None,
        foresee: Foresee | None = None,
        lift: Lift | None = None,
    ) -> list[TokenTree]:
        """Grows a tree for each sequence of a batch; none depends on the others.

        Args:
            roots: token id of each root.
            device: where the draft's logits are.
            sampled: whether the target's tokens are sampled, not greedy.
            expand, depths, ids, likeliest, foresee, lift: as in :class:`~longdraft.trees.level.Growth`; no ``depths``:
                as many levels as the kind has.
        """
        deepest = min(self.depth, self.max_nodes)  # a deeper node has more ancestors than there are nodes to keep
        depths = [deepest] * len(roots) if depths is None else [min(deepest, depth) for depth in depths]
        growth = Growth(expand, depths, ids, sampled and foresee is None, likeliest, foresee, lift)
        levels = self.levels(growth, root_level(roots, device))
        return [tree.best(self.max_nodes) for tree in to_trees(roots, levels)]
