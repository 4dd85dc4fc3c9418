"""What is believed of a draft: posteriors that forget.

:class:`Chances`: that a node is right, by the probability that its drafter gives its path (Beta posteriors).
:class:`Worth`: what asking the draft adds to a round (a Gamma posterior of tokens), and what it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

# Nodes are told apart by the log-probability of their path, in steps of this many nats, the last one open.
_STEP, _GRADES = 0.5, 12
# Observations that a prior is worth: how many it takes until half of what is believed is what was seen.
PRIOR = 4.0
# Tokens that a draft is hoped to add for each plain step that it takes: a bad one is given up after two trials.
HOPE = 4 / 3
# Tokens of the longest chain that is hoped for.
LONGEST = 8
# What a round leaves of the evidence before it: about the last hundred rounds count.
KEEP = 0.99


class Chances:
    """Of drafted nodes: what the draft says, corrected by what became of nodes of the same grade."""

    def __init__(self) -> None:
        self._right = [0.0] * _GRADES
        self._seen = [0.0] * _GRADES

    def chance(self, log_prob: float) -> float:
        """That a path of this log-probability is right: the mean of a Beta posterior around what its drafter says."""
        grade = _grade(log_prob)
        return (PRIOR * exp(log_prob) + self._right[grade]) / (PRIOR + self._seen[grade])

    def saw(self, log_prob: float, right: bool) -> None:
        """A verified node, and whether all of its path was right."""
        self._right[_grade(log_prob)] += right
        self._seen[_grade(log_prob)] += 1.0

    def fade(self) -> None:
        """Once a round."""
        self._right = [x * KEEP for x in self._right]
        self._seen = [x * KEEP for x in self._seen]


def _grade(log_prob: float) -> int:
    return min(int(-log_prob / _STEP), _GRADES - 1)


@dataclass
class Hope:
    """A belief about a draft that has not been tried: that it pays, by a little; or by what its drafter knows of it.

    Attributes:
        steps: plain steps that a round with the draft takes longer.
        known: tokens that it adds to such a round; None where nothing is known of it.
    """

    steps: float
    known: float | None = None

    @property
    def tokens(self) -> float:
        """That it adds to such a round."""
        return HOPE * self.steps if self.known is None else self.known

    @property
    def pays(self) -> bool:
        """True where it makes more tokens than plain decoding does in the same time."""
        return self.tokens > self.steps

    def chain(self, share: float, level: float) -> None:
        """Believes in the chain that makes the most tokens a plain step.

        Args:
            share: chance of each of its tokens to be right, behind right ones.
            level: plain steps that drafting and verifying one more takes.
        """
        tokens, best = 0.0, 0.0
        for n in range(1, LONGEST + 1):
            tokens += share**n
            if (rate := (1.0 + tokens) / (1.0 + n * level)) > best:
                best, self.known, self.steps = rate, tokens, n * level


class Worth:
    """What asking a draft adds to a round: tokens, were nothing else proposed, and the steps that it takes longer.

    Args:
        prior: as sure as ``PRIOR`` rounds; of a text, what is believed of all texts.
    """

    def __init__(self, prior: Hope | Worth) -> None:
        self._prior = prior
        self._tokens = self._new = self._steps = self._rounds = 0.0

    @property
    def tokens(self) -> float:
        """Mean of a Gamma posterior: tokens are counted as Poisson's are, and a round counts by what is new in it."""
        return (PRIOR * self._prior.tokens + self._tokens) / (PRIOR + self._new)

    @property
    def steps(self) -> float:
        """In time of plain decoding."""
        return (PRIOR * self._prior.steps + self._steps) / (PRIOR + self._rounds)

    def saw(self, tokens: float, new: float, steps: float) -> None:
        """A round with the draft.

        Args:
            tokens: that it added. new: the share of its tokens that nothing else proposed. steps: that it took longer.
        """
        self._tokens += tokens
        self._new += new
        self._steps += steps
        self._rounds += 1.0

    def fade(self) -> None:
        """Once a round."""
        self._tokens *= KEEP
        self._new *= KEEP
        self._steps *= KEEP
        self._rounds *= KEEP
