"""Estimates of acceptance, learned while decoding, with exponential decay of earlier evidence.

* :class:`AcceptanceModel`, for a planner: the probability that a node is accepted, given the drafter's probability of
  the node's path (Beta posteriors).
* :class:`DraftGain`, for a planner: how many tokens drafting adds to a round (a Gamma posterior), and how much time.
  Times are in plain steps: a plain step is a decoding step without a draft.
* :class:`AcceptanceCalibrator`, of a self-drafter: the agreement of the target on a part of its KV with the target.
* :class:`OnlinePlattScaler`, of a suffix lookup: corrects the frequencies of continuations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import torch

from longdraft.trees.tree import TokenTree

# Nodes are binned by path log-probability, in bins of half a nat. The last bin takes all lower values.
_BIN_WIDTH, _NUM_BINS = 0.5, 12
PRIOR_WEIGHT = 4.0  # number of observations that a prior counts as
# Tokens that a draft is assumed to add in a plain step of time. By this value a bad draft is given up in two rounds.
PRIOR_TOKENS_PER_STEP = 4 / 3
# The weight of the prior of a draft that gains much by its kind: one unlucky round does not end it.
STRONG_PRIOR_WEIGHT = 12.0
# Longest chain that :meth:`PriorDraftGain.assume_best_chain` considers.
MAX_ASSUMED_CHAIN = 8
# Factor on earlier evidence in each round, so that about the last hundred rounds count.
DECAY = 0.99
# A draft that is given up within so many rounds was tried in vain. After each such trial, evidence decays half as fast
# while the draft is unused, down to a ``MAX_PATIENCE``-th.
TRIAL_ROUNDS, MAX_PATIENCE = 8, 8


class AcceptanceModel:
    """Corrects a drafter's path probabilities by how often nodes of the same bin were accepted."""

    def __init__(self) -> None:
        self._accepted = [0.0] * _NUM_BINS
        self._counts = [0.0] * _NUM_BINS

    def probability(self, path_logprob: float) -> float:
        """Returns the probability that a path of this log-probability is accepted: the mean of a Beta posterior."""
        index = _bin(path_logprob)
        return (PRIOR_WEIGHT * exp(path_logprob) + self._accepted[index]) / (PRIOR_WEIGHT + self._counts[index])

    def observe(self, path_logprob: float, accepted: bool) -> None:
        """Counts a verified node. ``accepted``: True if all nodes of the path to the node were accepted."""
        self._accepted[_bin(path_logprob)] += accepted
        self._counts[_bin(path_logprob)] += 1.0

    def decay(self) -> None:
        """Forgets some of the evidence. Called once a round."""
        self._accepted = [x * DECAY for x in self._accepted]
        self._counts = [x * DECAY for x in self._counts]


def _bin(path_logprob: float) -> int:
    return min(int(-path_logprob / _BIN_WIDTH), _NUM_BINS - 1)


@dataclass
class PriorDraftGain:
    """The assumed gain of a draft before its first use."""

    extra_steps: float  # time that drafting adds to a round, in plain steps
    tokens_per_step: float = PRIOR_TOKENS_PER_STEP  # tokens that drafting adds in a plain step of its time
    # Tokens that drafting adds to a round, whatever time it then takes; None: by ``tokens_per_step``.
    expected_tokens: float | None = None
    weight: float = PRIOR_WEIGHT  # number of rounds that this counts as

    @property
    def added_tokens(self) -> float:
        """Tokens that drafting is assumed to add to a round."""
        return self.tokens_per_step * self.extra_steps if self.expected_tokens is None else self.expected_tokens

    @property
    def is_worthwhile(self) -> bool:
        """True if the draft adds more tokens than plain decoding emits in the time that drafting takes."""
        return self.added_tokens > self.extra_steps

    def assume_best_chain(self, acceptance: float, steps_per_token: float, is_strong: bool = False) -> None:
        """Sets the gain to that of the chain whose length emits the most tokens per plain step.

        Args:
            acceptance: probability that one token is accepted.
            steps_per_token: time to draft and verify it.
            is_strong: False gives a draft that barely pays up as soon as a round takes longer than this chain.
        """
        tokens, best_rate = 0.0, 0.0
        for length in range(1, MAX_ASSUMED_CHAIN + 1):
            tokens += acceptance**length
            rate = (1.0 + tokens) / (1.0 + length * steps_per_token)
            if rate > best_rate:
                best_rate, self.expected_tokens, self.extra_steps = rate, tokens, length * steps_per_token
        if is_strong and self.expected_tokens is not None:
            self.tokens_per_step, self.expected_tokens = self.expected_tokens / self.extra_steps, None
            self.weight = STRONG_PRIOR_WEIGHT


class DraftGain:
    """The learned gain of drafting in a round: added tokens, if a lookup proposed none of them, and added time.
    ``prior``: gain that counts as ``prior.weight`` rounds. A sequence's prior is the gain over all sequences."""

    def __init__(self, prior: PriorDraftGain | DraftGain) -> None:
        self._prior = prior
        self._added_tokens = self._new_fractions = self._extra_steps = self._rounds = 0.0
        self._uses, self._patience = 0, 1  # consecutive rounds with the draft; the decay's slowness without the draft

    @property
    def weight(self) -> float:
        """Number of rounds that the prior counts as."""
        return self._prior.weight

    @property
    def added_tokens(self) -> float:
        """Added tokens of a round: mean of a Gamma posterior for Poisson counts with exposure ``new_fraction``."""
        return (self.weight * self._prior.added_tokens + self._added_tokens) / (self.weight + self._new_fractions)

    @property
    def extra_steps(self) -> float:
        """Time that drafting adds to a round, in plain steps."""
        return (self.weight * self._prior.extra_steps + self._extra_steps) / (self.weight + self._rounds)

    def observe(self, added_tokens: float, new_fraction: float, extra_steps: float) -> None:
        """Counts a round with the draft. ``added_tokens``: accepted tokens that only the draft proposed.
        ``new_fraction``: fraction of the draft's tokens that no lookup proposed. ``extra_steps``: time of drafting."""
        self._added_tokens += added_tokens
        self._new_fractions += new_fraction
        self._extra_steps += extra_steps
        self._rounds += 1.0

    def decay(self, used: bool) -> None:
        """Forgets some of the evidence. Called once a round. ``used``: whether the round had the draft."""
        if used:
            self._uses += 1
            self._patience = self._patience if self._uses <= TRIAL_ROUNDS else 1
        elif self._uses:
            self._patience = min(MAX_PATIENCE, 2 * self._patience) if self._uses <= TRIAL_ROUNDS else 1
            self._uses = 0
        factor = DECAY if used else DECAY ** (1 / self._patience)
        self._added_tokens *= factor
        self._new_fractions *= factor
        self._extra_steps *= factor
        self._rounds *= factor


class AcceptanceCalibrator:
    """Calibrates the acceptance probabilities of self-drafting.

    A trained draft's top-1 token is accepted about as often as its probability p says. The top-1 token of the target on
    a part of its own KV is accepted more often: P(accepted) = a + (1 - a) p. The agreement rate a is the fraction of
    tokens at which the missing KV changes nothing. It is learned by expectation maximisation: an accepted top-1 token
    adds a / (a + (1 - a) p), the probability that the missing KV changed nothing, to a sum; a rejected token adds 0.

    ``prior_rate``: the estimate before the first observation.
    """

    # Number of observations that the prior counts as; factor on earlier evidence at each observation.
    PRIOR_WEIGHT, DECAY = 8.0, 0.98

    def __init__(self, prior_rate: float) -> None:
        self._prior = prior_rate
        self._agreement_sum = self._num_observations = 0.0  # both decay

    @property
    def agreement_rate(self) -> float:
        """The current estimate."""
        return (self.PRIOR_WEIGHT * self._prior + self._agreement_sum) / (self.PRIOR_WEIGHT + self._num_observations)

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
                agreement = rate / max(exp(tree.logprobs[top1]), rate, 1e-9)
            self._agreement_sum = self.DECAY * self._agreement_sum + agreement
            self._num_observations = self.DECAY * self._num_observations + 1.0
            if (node := tree.child(node or 0, token)) is None:
                return


class OnlinePlattScaler:
    """Calibrates probabilities by a linear function of the log-odds (Platt scaling), learned online.
    Proposals that the target did not verify are learned from too, because their next token becomes known anyway."""

    # Learning rate of the shift. The slope's rate is a tenth of this rate. Half or twice these rates did as well.
    RATE, SLOPE_FACTOR = 0.05, 0.1

    def __init__(self) -> None:
        self.shift, self.slope = 0.0, 1.0

    def calibrate(self, p: float) -> float:
        return 1.0 / (1.0 + exp(-self.shift - self.slope * _log_odds(p)))

    def observe(self, p: float, correct: bool) -> None:
        """Learns whether a token that was proposed with probability ``p`` was correct."""
        step = self.RATE * (correct - self.calibrate(p))
        self.shift += step
        self.slope += self.SLOPE_FACTOR * step * _log_odds(p)


def _log_odds(p: float) -> float:
    p = min(max(p, 1e-4), 1 - 1e-4)  # so that certain tokens have finite log-odds
    return log(p / (1 - p))
