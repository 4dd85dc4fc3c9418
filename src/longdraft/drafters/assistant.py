"""Drafts trees with Gemma 4's assistant (:mod:`longdraft.drafts.assistant`), which reads the target's KV."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.drafts.assistant import AssistantDraft
from longdraft.engine.drafter import DraftNeeds
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.options import Options, parse
from longdraft.trees.level import LevelExpander, TreeLevel, logits_or_topk
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NodeLimit, TokenTree


class AssistantDrafter(TreeDrafter):
    """Drafts trees with an assistant. ``options``: fields of :class:`TreeOptions`."""

    options: ClassVar[tuple[type[Options], ...]] = (TreeOptions,)

    def __init__(self, draft: AssistantDraft, **options: Any) -> None:
        (tree_options,) = parse("Gemma 4's assistant", options, *self.options)
        self.draft, self.tree = draft, tree_options.config("dynamic")

    def needs(self, runner: TargetRunner) -> DraftNeeds:
        return DraftNeeds(feature_layers=(runner.num_layers - 1,))

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self.bound, self.runner, self.store = self.draft.bind(runner), runner, store

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        shared = [self.bound.shared_kv(self.store, s.slot) for s in sequences]
        last: tuple[TreeLevel, torch.Tensor] | None = None  # a level, and features for the children of its nodes

        def expand(level: TreeLevel, top_k: int) -> tuple[torch.Tensor, ...]:
            nonlocal last
            self.forwards += 1
            if last is None:
                features = torch.stack([self._root_features(sequences[i]) for i in level.sequence_indices])
            else:
                features = last[0].index_select(level.sequence_indices, last[1])
                features = features.gather(1, level.parents[..., None].expand(-1, -1, features.shape[2]))
            steps = [
                self.bound.step(tokens, x, sequences[i].length - 1, shared[i])
                for i, tokens, x in zip(level.sequence_indices, level.tokens, features, strict=True)
            ]
            last = level, torch.stack([features for _, features in steps])
            return logits_or_topk(torch.stack([logits for logits, _ in steps]), top_k)

        return self.grow(sequences, LevelExpander(expand, self.runner.device), limit)

    def _root_features(self, sequence: Sequence) -> torch.Tensor:
        """Returns the target's last hidden state (1, hidden) before a sequence's root, after the final norm."""
        assert self.store.features is not None
        position = sequence.length - 2
        return self.runner.shared_parts.apply_final_norm(self.store.features[sequence.slot, position : position + 1])
