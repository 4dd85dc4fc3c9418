"""Knowledge of a draft, as posteriors that forget.

:class:`Chances`: the chance that a node is right, given the probability that its drafter gives its path (Beta
posteriors). :class:`Gain`: the tokens that a forward of the draft adds to a round (a Gamma posterior), and its time.
Times are in plain steps: one step of decoding without a draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

# Nodes are grouped into grades by the log-probability of their path: steps of half a nat, the last grade open.
_STEP, _GRADES = 0.5, 12
# A prior weighs as much as this many observations.
PRIOR = 4.0
# Before it was tried, a draft is believed to add this many tokens per plain step that it takes: a bad one is given up
# after two trials.
PRIOR_RATE = 4 / 3
# Longest chain considered when a draft's chance of being right is known beforehand.
LONGEST = 8
# Evidence is multiplied by this once a round, so about the last hundred rounds count.
KEEP = 0.99


class Chances:
    """Corrects a drafter's probabilities by how often nodes of the same grade were right."""

    def __init__(self) -> None:
        self._right = [0.0] * _GRADES
        self._counts = [0.0] * _GRADES

    def chance(self, log_prob: float) -> float:
        """The chance that a path of this log-probability is right: the mean of a Beta posterior."""
        grade = _grade(log_prob)
        return (PRIOR * exp(log_prob) + self._right[grade]) / (PRIOR + self._counts[grade])

    def observe(self, log_prob: float, right: bool) -> None:
        """Counts a verified node; ``right`` if all of its path was."""
        self._right[_grade(log_prob)] += right
        self._counts[_grade(log_prob)] += 1.0

    def fade(self) -> None:
        """Called once a round."""
        self._right = [x * KEEP for x in self._right]
        self._counts = [x * KEEP for x in self._counts]


def _grade(log_prob: float) -> int:
    return min(int(-log_prob / _STEP), _GRADES - 1)


@dataclass
class PriorGain:
    """The belief about a draft that has not been tried: it pays by a little, unless its drafter knows better.

    Attributes:
        steps: plain steps that a round with the draft takes longer.
        known: tokens that it adds to such a round; None if the drafter does not say.
    """

    steps: float
    known: float | None = None

    @property
    def tokens(self) -> float:
        return PRIOR_RATE * self.steps if self.known is None else self.known

    @property
    def pays(self) -> bool:
        """True if the draft adds more tokens than plain decoding makes in the same time."""
        return self.tokens > self.steps

    def assume_chain(self, acceptance: float, level: float) -> None:
        """Assumes the chain that makes the most tokens a plain step.

        Args:
            acceptance: chance of each of its tokens to be right, if those before it are.
            level: plain steps that drafting and verifying one more token takes.
        """
        tokens, best_rate = 0.0, 0.0
        for n in range(1, LONGEST + 1):
            tokens += acceptance**n
            rate = (1.0 + tokens) / (1.0 + n * level)
            if rate > best_rate:
                best_rate, self.known, self.steps = rate, tokens, n * level


class Gain:
    """The gain of drafting in a round: the tokens it adds if nothing else proposes any, and the plain steps it takes.

    Args:
        prior: weighs as much as ``PRIOR`` rounds; for one text, the gain over all texts.
    """

    def __init__(self, prior: PriorGain | Gain) -> None:
        self._prior = prior
        self._tokens = self._new = self._steps = self._rounds = 0.0

    @property
    def tokens(self) -> float:
        """Mean of a Gamma posterior for Poisson counts; a round weighs as much as its share of new tokens."""
        return (PRIOR * self._prior.tokens + self._tokens) / (PRIOR + self._new)

    @property
    def steps(self) -> float:
        return (PRIOR * self._prior.steps + self._steps) / (PRIOR + self._rounds)

    def observe(self, tokens: float, new: float, steps: float) -> None:
        """Counts a round with the draft.

        Args:
            tokens: that the draft added.
            new: share of the draft's tokens that nothing else proposed.
            steps: plain steps that the round took longer.
        """
        self._tokens += tokens
        self._new += new
        self._steps += steps
        self._rounds += 1.0

    def fade(self) -> None:
        """Called once a round."""
        self._tokens *= KEEP
        self._new *= KEEP
        self._steps *= KEEP
        self._rounds *= KEEP
