"""Calibrated acceptance probabilities for self-drafting.

A trained draft's top-1 token is accepted with about its probability p. The target on a part of its own KV does better:
P(top-1 accepted) = a + (1 - a) p. The agreement rate a is the fraction of tokens at which the missing KV changes
nothing. It is learned online by expectation maximisation: an accepted token counts a / (a + (1 - a) p), the probability
that the missing KV changed nothing there; a rejected token counts 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import torch

from longdraft.trees.tree import TokenTree

PRIOR_WEIGHT = 8.0  # number of observations that the prior counts as
DECAY = 0.98  # factor on earlier evidence at each observation
_MIN_PROBABILITY = 1e-9


class AcceptanceCalibrator:
    """Estimates the agreement rate ``a`` of a draft. ``prior_rate``: the estimate before the first observation."""

    def __init__(self, prior_rate: float) -> None:
        self._prior = prior_rate
        self._agreement_sum = self._count = 0.0

    @property
    def agreement_rate(self) -> float:
        """The current estimate."""
        return (PRIOR_WEIGHT * self._prior + self._agreement_sum) / (PRIOR_WEIGHT + self._count)

    def calibrate(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Converts log-probabilities (..., K) of a node's children, the top-1 first, to those of acceptance."""
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
            agreement, rate = 0.0, self.agreement_rate
            if tree.tokens[top1] == token:  # its calibrated probability was a + (1 - a) p
                agreement = rate / max(exp(tree.logprobs[top1]), rate, _MIN_PROBABILITY)
            self._agreement_sum, self._count = DECAY * self._agreement_sum + agreement, DECAY * self._count + 1.0
            if (node := tree.child(node or 0, token)) is None:
                return
