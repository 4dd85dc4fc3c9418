"""Base of drafters that grow a tree of any kind from a draft's logits."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from longdraft.engine.drafter import Drafter
from longdraft.engine.sequence import Sequence
from longdraft.trees.kind import TreeKind, chain
from longdraft.trees.level import Expand, Level, Lift, Likeliest
from longdraft.trees.tree import LARGEST, NodeLimit, TokenTree


class TreeDrafter(Drafter):
    """Drafts trees of one kind. Options that make no tree, or that do not go together, are a ValueError.

    Attributes:
        tree: the kind, and its sizes.
    """

    tree: TreeKind

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        return self.tree.max_nodes

    def use_planner(self) -> None:
        """Switches to a tree that a planner can size, a chain or an OPT-Tree, unless the user chose one."""
        self.tree = self.tree.fit(LARGEST)

    def avoid_forks(self) -> bool:
        """Drafts a chain, as long as the tree would have been deep, unless the user chose the tree."""
        if not self.tree.chosen_by_user and self.tree.name != "chain":
            self.tree = chain(self.tree.depth, self.tree.depth)
        return self.tree.name == "chain"

    def grow(
        self,
        sequences: SequenceOf[Sequence],
        expand: Expand,
        ids: torch.Tensor | None,
        device: torch.device | str,
        limit: NodeLimit | None,
        likeliest: Likeliest | None = None,
        lift: Lift | None = None,
    ) -> list[TokenTree]:
        """A tree for each sequence, rooted at its last token.

        Args:
            expand, ids, device, likeliest, lift: the draft, as :meth:`TreeKind.grow` takes them.
            limit: how large the trees may be; None: the sizes that the drafter was made with.
        """
        sampled = not sequences[0].greedy

        def foresee(level: Level, log_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            samplers = [sequences[row].sampler for row in level.rows]
            rows = zip(samplers, log_probs, tokens, strict=True)
            return torch.stack([sampler.foresee(level.depth, *row) for sampler, *row in rows])

        return self.tree.fit(limit).grow(
            [s.output[-1] for s in sequences],
            expand,
            # A path of depth k emits k + 1 tokens. Positions beyond the context are never asked for either.
            [s.remaining - 1 for s in sequences],
            ids,
            device,
            likeliest=likeliest,
            lift=lift,
            foresee=foresee if sampled and all(s.sampler.foresees for s in sequences) else None,
        )
