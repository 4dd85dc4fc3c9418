"""Calibrated acceptance probabilities for self-drafting.

A trained draft's top-1 token is accepted with about its probability p. The target on a part of its own KV does better:
P(top-1 accepted) = a + (1 - a) p, where the agreement rate a is the fraction of tokens at which the missing KV changes
nothing. a is learned online by expectation maximisation: an accepted token counts a / (a + (1 - a) p), the probability
that it was one of these tokens; a rejected token counts 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import torch

from longdraft.trees.tree import TokenTree

# Number of observations that the prior counts as, and factor on the evidence at each observation.
PRIOR_WEIGHT, DECAY = 8.0, 0.98
_MIN_PROBABILITY = 1e-9


class AcceptanceCalibrator:
    """Estimates the agreement rate ``a`` of a draft. ``prior_rate``: the estimate before the first observation."""

    def __init__(self, prior_rate: float) -> None:
        self._prior = prior_rate
        self._agreed = self._count = 0.0

    @property
    def agreement_rate(self) -> float:
        """The current estimate."""
        return (PRIOR_WEIGHT * self._prior + self._agreed) / (PRIOR_WEIGHT + self._count)

    def calibrate(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Corrects log-probabilities (..., K) of a node's children, sorted, to log-probabilities of acceptance."""
        calibrated = torch.log1p(torch.full_like(logprobs, -self.agreement_rate)) + logprobs
        calibrated[..., 0] = torch.log(self.agreement_rate + calibrated[..., 0].exp())
        return calibrated

    def observe(self, tree: TokenTree, emitted: Sequence[int]) -> None:
        """Learns from a tree with calibrated log-probabilities, and the tokens emitted after its root."""
        node: int | None = 0
        for token in emitted:
            children = [i for i in range(tree.size) if tree.parents[i] == node]
            if not children:
                return
            top1 = max(children, key=lambda i: tree.logprobs[i])
            agreed, rate = 0.0, self.agreement_rate
            if tree.tokens[top1] == token:
                agreed = rate / max(exp(tree.logprobs[top1]), rate, _MIN_PROBABILITY)
            self._agreed, self._count = DECAY * self._agreed + agreed, DECAY * self._count + 1.0
            if (node := tree.child(node or 0, token)) is None:
                return
