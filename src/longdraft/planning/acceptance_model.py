"""Bayesian estimates, with exponential decay, of a draft's acceptance and gain, for a planner.

:class:`AcceptanceModel` estimates the probability that a node is accepted, given the drafter's probability of the
node's path (Beta posteriors). :class:`DraftGain` estimates how many tokens drafting adds to a round (a Gamma
posterior), and how much time. Times are in plain steps: a plain step is a decoding step without a draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

# Nodes are binned by path log-probability, in bins of half a nat. The last bin takes all lower values.
_BIN_WIDTH, _NUM_BINS = 0.5, 12
PRIOR_WEIGHT = 4.0  # number of observations that a prior counts as
# Tokens that a draft is assumed to add in a plain step of time. By this value a bad draft is given up in two rounds.
PRIOR_TOKENS_PER_STEP = 4 / 3
# Longest chain that :meth:`PriorDraftGain.assume_best_chain` considers.
MAX_ASSUMED_CHAIN = 8
# Factor on earlier evidence in each round, so that about the last hundred rounds count.
DECAY = 0.99


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
    expected_tokens: float | None = None  # tokens that drafting adds to a round; None: :data:`PRIOR_TOKENS_PER_STEP`

    @property
    def added_tokens(self) -> float:
        """Tokens that drafting is assumed to add to a round."""
        return PRIOR_TOKENS_PER_STEP * self.extra_steps if self.expected_tokens is None else self.expected_tokens

    @property
    def is_worthwhile(self) -> bool:
        """True if the draft adds more tokens than plain decoding emits in the time that drafting takes."""
        return self.added_tokens > self.extra_steps

    def assume_best_chain(self, acceptance: float, steps_per_token: float) -> None:
        """Sets the gain to that of the chain whose length emits the most tokens per plain step.
        ``acceptance``: probability that one token is accepted. ``steps_per_token``: time to draft and verify it."""
        tokens, best_rate = 0.0, 0.0
        for length in range(1, MAX_ASSUMED_CHAIN + 1):
            tokens += acceptance**length
            rate = (1.0 + tokens) / (1.0 + length * steps_per_token)
            if rate > best_rate:
                best_rate, self.expected_tokens, self.extra_steps = rate, tokens, length * steps_per_token


class DraftGain:
    """The learned gain of drafting in a round: added tokens, if a lookup proposed none of them, and added time.
    ``prior``: gain that counts as ``PRIOR_WEIGHT`` rounds. A sequence's prior is the gain over all sequences."""

    def __init__(self, prior: PriorDraftGain | DraftGain) -> None:
        self._prior = prior
        self._added_tokens = self._new_fractions = self._extra_steps = self._rounds = 0.0

    @property
    def added_tokens(self) -> float:
        """Added tokens of a round: mean of a Gamma posterior for Poisson counts with exposure ``new_fraction``."""
        return (PRIOR_WEIGHT * self._prior.added_tokens + self._added_tokens) / (PRIOR_WEIGHT + self._new_fractions)

    @property
    def extra_steps(self) -> float:
        """Time that drafting adds to a round, in plain steps."""
        return (PRIOR_WEIGHT * self._prior.extra_steps + self._extra_steps) / (PRIOR_WEIGHT + self._rounds)

    def observe(self, added_tokens: float, new_fraction: float, extra_steps: float) -> None:
        """Counts a round with the draft. ``added_tokens``: accepted tokens that only the draft proposed.
        ``new_fraction``: fraction of the draft's tokens that no lookup proposed. ``extra_steps``: time of drafting."""
        self._added_tokens += added_tokens
        self._new_fractions += new_fraction
        self._extra_steps += extra_steps
        self._rounds += 1.0

    def decay(self) -> None:
        """Forgets some of the evidence. Called once a round."""
        self._added_tokens *= DECAY
        self._new_fractions *= DECAY
        self._extra_steps *= DECAY
        self._rounds *= DECAY
