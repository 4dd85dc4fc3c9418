"""Base of drafters that grow a tree from a draft's logits."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch

from longdraft.engine.drafter import Drafter
from longdraft.engine.sequence import Sequence
from longdraft.trees.level import LevelExpander, TreeLevel
from longdraft.trees.tree import NO_LIMIT, NodeLimit, TokenTree
from longdraft.trees.tree_config import TreeConfig, chain


class TreeDrafter(Drafter):
    """Drafts trees of the shape ``tree``, which a subclass sets."""

    tree: TreeConfig

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        return self.tree.max_nodes

    def use_planner(self) -> None:
        """Switches to a shape that a planner can size, a chain or an OPT-Tree, unless the user chose a shape."""
        self.tree = self.tree.fit(NO_LIMIT)  # the largest tree of this shape, because memory is allocated for its size

    def use_chains(self) -> bool:
        """Switches to a chain as long as the tree is deep, unless the user chose the shape."""
        if not self.tree.is_user_defined and self.tree.name != "chain":
            self.tree = chain(self.tree.depth, self.tree.depth)
        return self.tree.name == "chain"

    def grow(
        self, sequences: SequenceOf[Sequence], expander: LevelExpander, limit: NodeLimit | None
    ) -> list[TokenTree]:
        """Grows a tree for each sequence, rooted at its last token. ``limit``: the planner's limit; None: no limit."""

        def coupled_logprobs(level: TreeLevel, logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            samplers = [sequences[i].sampler for i in level.sequence_indices]
            inputs = zip(samplers, logprobs, tokens, strict=True)
            return torch.stack([sampler.gumbel_coupled_logprobs(level.depth, x, ids) for sampler, x, ids in inputs])

        if not sequences[0].greedy and all(s.sampler.is_noise_known for s in sequences):
            expander = replace(expander, coupled_logprobs=coupled_logprobs)
        roots, max_depths = [s.output[-1] for s in sequences], [s.max_draft_depth for s in sequences]
        return self.tree.fit(limit).grow(roots, expander, max_depths)
