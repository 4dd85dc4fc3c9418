"""Knowledge of a draft, as posteriors that forget.

:class:`AcceptanceModel`: the chance that a node is right, given the probability that its drafter gives its path (Beta
posteriors). :class:`DraftGain`: the tokens that a forward of the draft adds to a round (a Gamma posterior), and its time.
Times are in plain steps: one step of decoding without a draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

# Nodes are grouped into grades by the log-probability of their path: steps of half a nat, the last grade open.
_STEP, _GRADES = 0.5, 12
# A prior weighs as much as this many observations.
PRIOR_WEIGHT = 4.0
# Before it was tried, a draft is believed to add this many tokens per plain step that it takes: a bad one is given up
# after two trials.
PRIOR_TOKENS_PER_STEP = 4 / 3
# Longest chain considered when a draft's chance of being right is known beforehand.
MAX_ASSUMED_CHAIN = 8
# Evidence is multiplied by this once a round, so about the last hundred rounds count.
DECAY = 0.99


class AcceptanceModel:
    """Corrects a drafter's probabilities by how often nodes of the same grade were right."""

    def __init__(self) -> None:
        self._right = [0.0] * _GRADES
        self._counts = [0.0] * _GRADES

    def probability(self, path_logprob: float) -> float:
        """The chance that a path of this log-probability is right: the mean of a Beta posterior."""
        grade = _grade(path_logprob)
        return (PRIOR_WEIGHT * exp(path_logprob) + self._right[grade]) / (PRIOR_WEIGHT + self._counts[grade])

    def observe(self, path_logprob: float, accepted: bool) -> None:
        """Counts a verified node; ``accepted`` if all of its path was."""
        self._right[_grade(path_logprob)] += accepted
        self._counts[_grade(path_logprob)] += 1.0

    def decay(self) -> None:
        """Called once a round."""
        self._right = [x * DECAY for x in self._right]
        self._counts = [x * DECAY for x in self._counts]


def _grade(logprob: float) -> int:
    return min(int(-logprob / _STEP), _GRADES - 1)


@dataclass
class PriorDraftGain:
    """The belief about a draft that has not been tried: it pays by a little, unless its drafter knows better.

    Attributes:
        extra_steps: plain steps that a round with the draft takes longer.
        expected_tokens: tokens that it adds to such a round; None if the drafter does not say.
    """

    extra_steps: float
    expected_tokens: float | None = None

    @property
    def added_tokens(self) -> float:
        return PRIOR_TOKENS_PER_STEP * self.extra_steps if self.expected_tokens is None else self.expected_tokens

    @property
    def is_worthwhile(self) -> bool:
        """True if the draft adds more tokens than plain decoding makes in the same time."""
        return self.added_tokens > self.extra_steps

    def assume_best_chain(self, acceptance: float, steps_per_token: float) -> None:
        """Assumes the chain that makes the most tokens a plain step.

        Args:
            acceptance: chance of each of its tokens to be right, if those before it are.
            steps_per_token: plain steps that drafting and verifying one more token takes.
        """
        tokens, best_rate = 0.0, 0.0
        for n in range(1, MAX_ASSUMED_CHAIN + 1):
            tokens += acceptance**n
            rate = (1.0 + tokens) / (1.0 + n * steps_per_token)
            if rate > best_rate:
                best_rate, self.expected_tokens, self.extra_steps = rate, tokens, n * steps_per_token


class DraftGain:
    """The gain of drafting in a round: the tokens it adds if nothing else proposes any, and the plain steps it takes.

    Args:
        prior: weighs as much as ``PRIOR_WEIGHT`` rounds; for one text, the gain over all texts.
    """

    def __init__(self, prior: PriorDraftGain | DraftGain) -> None:
        self._prior = prior
        self._tokens = self._new = self._steps = self._rounds = 0.0

    @property
    def added_tokens(self) -> float:
        """Mean of a Gamma posterior for Poisson counts; a round weighs as much as its share of new tokens."""
        return (PRIOR_WEIGHT * self._prior.added_tokens + self._tokens) / (PRIOR_WEIGHT + self._new)

    @property
    def extra_steps(self) -> float:
        return (PRIOR_WEIGHT * self._prior.extra_steps + self._steps) / (PRIOR_WEIGHT + self._rounds)

    def observe(self, added_tokens: float, new_fraction: float, extra_steps: float) -> None:
        """Counts a round with the draft.

        Args:
            added_tokens: that the draft added.
            new_fraction: share of the draft's tokens that nothing else proposed.
            extra_steps: plain steps that the round took longer.
        """
        self._tokens += added_tokens
        self._new += new_fraction
        self._steps += extra_steps
        self._rounds += 1.0

    def decay(self) -> None:
        """Called once a round."""
        self._tokens *= DECAY
        self._new *= DECAY
        self._steps *= DECAY
        self._rounds *= DECAY
