"""An estimate of how often a draft chooses the target's token, however sure the draft is.

A trained draft is right about as often as its probability p says. The target on a part of its own KV is right more
often: where it is unsure, so is the target, and mostly in the same way. Its first choice is right with a + (1 - a) p,
where a is the share of tokens at which what it does not see changes nothing. That share is learned (expectation
maximisation): a right choice counts for the chance that it was one of these tokens, a / (a + (1 - a) p), a wrong one
for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import torch

from longdraft.trees.tree import TokenTree

# Choices that the prior is worth, and what a choice leaves of the evidence before it.
PRIOR_WEIGHT, DECAY = 8.0, 0.98
_LEAST = 1e-9  # a chance is more than nothing


class AcceptanceCalibrator:
    """The share `a` of a draft.

    Args:
        share: the estimate before the first observation.
    """

    def __init__(self, prior_rate: float) -> None:
        self._prior = prior_rate
        self._same = self._seen = 0.0

    @property
    def agreement_rate(self) -> float:
        """The current estimate."""
        return (PRIOR_WEIGHT * self._prior + self._same) / (PRIOR_WEIGHT + self._seen)

    def calibrate(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (..., K) of a node's children, the likeliest first, corrected by the estimate."""
        others = torch.log1p(torch.full_like(logprobs, -self.agreement_rate)) + logprobs
        others[..., 0] = torch.log(self.agreement_rate + others[..., 0].exp())
        return others

    def observe(self, tree: TokenTree, emitted: Sequence[int]) -> None:
        """Learns from a tree whose log-probabilities were lifted, and what was emitted behind its root."""
        node: int | None = 0
        for token in emitted:
            choices = [i for i in range(tree.size) if tree.parents[i] == node]
            if not choices:
                return
            first = max(choices, key=lambda i: tree.logprobs[i])
            right = tree.tokens[first] == token
            same = self.agreement_rate / max(exp(tree.logprobs[first]), self.agreement_rate, _LEAST) if right else 0.0
            self._same, self._seen = DECAY * self._same + same, DECAY * self._seen + 1.0
            if (node := tree.child(node or 0, token)) is None:
                return
