"""Static tree of sampled tokens: a node's children are sampled from what the draft says follows it.

The tree remembers the draft distribution, and the target may accept by it (:mod:`longdraft.engine.residual`). The shape
depends on nothing that was sampled, or the distribution would not be the true one any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from longdraft.trees.draft_sampler import DraftSampler
from longdraft.trees.level import Expand, Foresee, Level, Lift, Likeliest, root_level
from longdraft.trees.static import Static
from longdraft.trees.tree import SampledChildren, TokenTree

# log of what stands for a probability of 0
_NEVER = -1e9


@dataclass(frozen=True, kw_only=True)
class SampledStatic(Static):
    """A static tree whose tokens are sampled where the target's are; ``widths`` of ones make a chain."""

    samples: ClassVar[bool] = True

    def grow(
        self,
        roots: Sequence[int],
        expand: Expand,
        depths: Sequence[int] | None = None,
        ids: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        *,
        sampled: bool = False,
        samplers: Sequence[DraftSampler | None] = (),
        likeliest: Likeliest | None = None,
        foresee: Foresee | None = None,
        lift: Lift | None = None,
    ) -> list[TokenTree]:
        known = [sampler for sampler in samplers if sampler is not None]
        if not known:
            return super().grow(roots, expand, depths, ids, device, sampled=sampled, likeliest=likeliest)
        depths = self._depths(roots, depths)
        made = [_Growing(root, sampler, ids) for root, sampler in zip(roots, known, strict=True)]
        level = root_level(roots, device).level
        for depth, width in enumerate(self.widths):
            if not (rows := [r for r in level.rows if depths[r] > depth]):
                break
            level = level.kept(rows)
            logits = expand(level)
            # All nodes have as many: those that q holds impossible stay in the tree, as good as any other guess.
            each = min(width, int(logits.shape[-1]))
            tokens = torch.tensor([made[row].add(logits[i], each) for i, row in enumerate(rows)], device=device)
            parents = torch.arange(level.tokens.shape[1], device=device).repeat_interleave(each)
            level = Level(tuple(rows), depth + 1, tokens, parents.expand_as(tokens))
        return [tree.finished() for tree in made]


class _Growing:
    """One tree as it grows."""

    def __init__(self, root: int, sampler: DraftSampler, ids: torch.Tensor | None) -> None:
        self._sampler, self._ids = sampler, ids
        self._tokens, self._parents, self._log_probs = [root], [-1], [0.0]
        self._sampled: dict[int, SampledChildren] = {}
        self._paths: list[list[int]] = [[]]  # tokens from the root to each node, the root left out
        self._last = range(1)

    def add(self, logits: torch.Tensor, width: int) -> list[int]:
        """Samples the children of the last level, logits (W, draft vocabulary); returns their tokens."""
        first = len(self._tokens)
        for node, row in zip(self._last, logits, strict=True):
            q = self._sampler.distribution(self._paths[node], row, self._ids)
            tokens, possible = self._sampler.sample(q, width)
            self._sampled[node] = SampledChildren(q, tuple(tokens[:possible]))
            self._tokens += tokens
            self._parents += [node] * len(tokens)
            self._log_probs += q[tokens].log().clamp_min(_NEVER).tolist()
            self._paths += [[*self._paths[node], token] for token in tokens]
        self._last = range(first, len(self._tokens))
        return self._tokens[first:]

    def finished(self) -> TokenTree:
        return TokenTree(tuple(self._tokens), tuple(self._parents), tuple(self._log_probs), self._sampled)
