"""Calibrated acceptance probabilities for self-drafting.

A trained draft's top-1 token is accepted about as often as its probability p says. The top-1 token of the target on a
part of its own KV is accepted more often: P(accepted) = a + (1 - a) p. The agreement rate a is the fraction of tokens
at which the missing KV changes nothing. It is learned online by expectation maximisation: an accepted top-1 token adds
a / (a + (1 - a) p), the probability that the missing KV changed nothing, to a sum; a rejected token adds 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import torch

from longdraft.trees.tree import TokenTree

PRIOR_WEIGHT = 8.0  # number of observations that the prior counts as
DECAY = 0.98  # factor on earlier evidence at each observation
_MIN_PROBABILITY = 1e-9  # keeps a quotient finite


class AcceptanceCalibrator:
    """Estimates the agreement rate ``a`` of a draft. ``prior_rate``: the estimate before the first observation."""

    def __init__(self, prior_rate: float) -> None:
        self._prior = prior_rate
        self._agreement_sum = self._num_observations = 0.0  # both decay

    @property
    def agreement_rate(self) -> float:
        """The current estimate."""
        return (PRIOR_WEIGHT * self._prior + self._agreement_sum) / (PRIOR_WEIGHT + self._num_observations)

    def calibrate(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Converts a draft's log-probabilities (..., K) to those of acceptance. Index 0 must be the top-1 token."""
        calibrated = torch.log1p(torch.full_like(logprobs, -self.agreement_rate)) + logprobs
        calibrated[..., 0] = torch.log(self.agreement_rate + calibrated[..., 0].exp())
        return calibrated

    def observe(self, tree: TokenTree, emitted: Sequence[int]) -> None:
        """Learns from a tree with calibrated log-probabilities, and from the tokens that followed the tree's root."""
        node: int | None = 0
        for token in emitted:
            children = [i for i in range(tree.size) if tree.parents[i] == node]
            if not children:
                return
            top1 = max(children, key=lambda i: tree.logprobs[i])
            agreement, rate = 0.0, self.agreement_rate  # the top-1 token's calibrated probability is a + (1 - a) p
            if tree.tokens[top1] == token:
                agreement = rate / max(exp(tree.logprobs[top1]), rate, _MIN_PROBABILITY)
            self._agreement_sum = DECAY * self._agreement_sum + agreement
            self._num_observations = DECAY * self._num_observations + 1.0
            if (node := tree.child(node or 0, token)) is None:
                return
