"""What a kind of tree is: its sizes, how it grows from a draft, and what a planner makes of it."""

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
        nodes: verify only this many drafted nodes, the most probable; None: all.
        chosen_by_user: whether the user chose the tree: a planner then leaves it as it is.
    """

    nodes: int | None = None
    chosen_by_user: bool = False

    @property
    @abstractmethod
    def depth(self) -> int:
        """Levels at most, and so calls of the draft."""

    @property
    @abstractmethod
    def candidates(self) -> int:
        """Drafted nodes there are at most, before the most probable of them are chosen."""

    @property
    @abstractmethod
    def max_expanded(self) -> int:
        """Most drafted nodes that are given to the draft in a round: rows of KV that it needs for a tree."""

    @property
    def max_nodes(self) -> int:
        """Most drafted nodes of a tree."""
        return min(self.candidates, self.nodes or self.candidates)

    @abstractmethod
    def levels(self, growth: Growth, roots: Scored) -> list[Scored]:
        """Asks the draft, level by level; returns every level's candidates."""

    @abstractmethod
    def limited(self, depth: int) -> TreeKind:
        """The same kind with at most ``depth`` levels."""

    @abstractmethod
    def _fit(self, limit: NodeLimit) -> TreeKind: ...

    def fit(self, limit: NodeLimit | None) -> TreeKind:
        """The tree to grow within a planner's limit; this one if there is none, or if the user asked for it."""
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
            expand: the draft. Called with the roots, then with those nodes of each level but the last that go on.
            depths: levels of each sequence's tree at most, 0 for a root alone; None: as many as the kind has.
            ids: (draft vocabulary,) target id of each draft id; None: they are the same.
            device: where the draft's logits are.
            sampled: the target's tokens are sampled, not greedy.
            likeliest: the draft, where it can say the likeliest tokens without giving logits; None: ``expand`` does.
            foresee: says which tokens will be sampled; None: nobody does.
            lift: what to believe of the draft's probabilities; None: what they say.
        """
        known = foresee is not None
        growth = Growth(expand, self._depths(roots, depths), ids, sampled and not known, likeliest, foresee, lift)
        levels = self.levels(growth, root_level(roots, device))
        return [tree.best(self.max_nodes) for tree in to_trees(roots, levels)]

    def _depths(self, roots: Sequence[int], depths: Sequence[int] | None) -> list[int]:
        most = min(self.depth, self.max_nodes)  # a deeper node has more ancestors than there are nodes to keep
        return [most if depths is None else min(most, depths[i]) for i in range(len(roots))]
