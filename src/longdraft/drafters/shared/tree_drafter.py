"""Base of drafters that grow a tree from a draft's logits."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from longdraft.engine.drafter import Drafter
from longdraft.engine.sequence import Sequence
from longdraft.trees.level import Calibrate, DraftLogits, DraftTopk, TreeLevel
from longdraft.trees.tree import NO_LIMIT, NodeLimit, TokenTree
from longdraft.trees.tree_config import TreeConfig, chain


class TreeDrafter(Drafter):
    """Drafts trees of one shape, ``tree``."""

    tree: TreeConfig

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        return self.tree.max_nodes

    def use_planner(self) -> None:
        """Switches to a shape that a planner can size, a chain or an OPT-Tree, unless the user chose one."""
        self.tree = self.tree.fit(NO_LIMIT)

    def use_chains(self) -> bool:
        """Drafts a chain as long as the tree is deep, unless the user chose the shape."""
        if not self.tree.is_user_defined and self.tree.name != "chain":
            self.tree = chain(self.tree.depth, self.tree.depth)
        return self.tree.name == "chain"

    def grow(
        self,
        sequences: SequenceOf[Sequence],
        draft_logits: DraftLogits,
        draft_to_target_ids: torch.Tensor | None,
        device: torch.device | str,
        limit: NodeLimit | None,
        draft_topk: DraftTopk | None = None,
        calibrate: Calibrate | None = None,
    ) -> list[TokenTree]:
        """Grows a tree for each sequence, rooted at its last token.
        ``limit``: the planner's; None: the drafter's own tree shape. The others are as for :meth:`TreeConfig.grow`."""
        is_sampled = not sequences[0].greedy

        def coupled_logprobs(level: TreeLevel, logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            samplers = [sequences[i].sampler for i in level.sequence_indices]
            items = zip(samplers, logprobs, tokens, strict=True)
            return torch.stack([sampler.gumbel_coupled_logprobs(level.depth, *item) for sampler, *item in items])

        return self.tree.fit(limit).grow(
            [s.output[-1] for s in sequences],
            draft_logits,
            # A path of depth k emits k + 1 tokens. This also keeps positions within the context.
            [s.remaining - 1 for s in sequences],
            draft_to_target_ids,
            device,
            draft_topk=draft_topk,
            calibrate=calibrate,
            coupled_logprobs=coupled_logprobs
            if is_sampled and all(s.sampler.is_noise_known for s in sequences)
            else None,
        )
