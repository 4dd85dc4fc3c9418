"""Base of drafters that grow a tree of any kind from a draft's logits."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from longdraft.engine.drafter import Drafter
from longdraft.engine.sequence import Sequence
from longdraft.trees.kind import TreeConfig, chain
from longdraft.trees.level import Calibrate, DraftLogits, DraftTopk, TreeLevel
from longdraft.trees.tree import NO_LIMIT, NodeLimit, TokenTree


class TreeDrafter(Drafter):
    """Drafts trees of one kind. Options that make no tree, or that do not go together, are a ValueError.

    Attributes:
        tree: the kind, and its sizes.
    """

    tree: TreeConfig

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        return self.tree.max_nodes

    def use_planner(self) -> None:
        """Switches to a tree that a planner can size, a chain or an OPT-Tree, unless the user chose one."""
        self.tree = self.tree.fit(NO_LIMIT)

    def use_chains(self) -> bool:
        """Drafts a chain, as long as the tree would have been deep, unless the user chose the tree."""
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
        likeliest: DraftTopk | None = None,
        calibrate: Calibrate | None = None,
    ) -> list[TokenTree]:
        """A tree for each sequence, rooted at its last token.

        Args:
            expand, ids, device, likeliest, lift: the draft, as :meth:`TreeConfig.grow` takes them.
            limit: how large the trees may be; None: the sizes that the drafter was made with.
        """
        sampled = not sequences[0].greedy

        def foresee(level: TreeLevel, logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            samplers = [sequences[row].sampler for row in level.sequence_indices]
            rows = zip(samplers, logprobs, tokens, strict=True)
            return torch.stack([sampler.gumbel_coupled_logprobs(level.depth, *row) for sampler, *row in rows])

        return self.tree.fit(limit).grow(
            [s.output[-1] for s in sequences],
            draft_logits,
            # A path of depth k emits k + 1 tokens. Positions beyond the context are never asked for either.
            [s.remaining - 1 for s in sequences],
            draft_to_target_ids,
            device,
            likeliest=likeliest,
            calibrate=calibrate,
            coupled_logprobs=foresee if sampled and all(s.sampler.is_noise_known for s in sequences) else None,
        )
