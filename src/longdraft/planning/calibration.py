"""How far to believe a drafter's probabilities: by what became of its nodes lately."""

from __future__ import annotations

# Nodes are told apart by the log-probability of their path, in steps of this many nats, the last one open.
_STEP, _GRADES = 0.25, 24
# Tokens' worth of belief in the drafter before anything was seen, and what a round leaves of what was seen.
_PRIOR, _KEEP = 1.0, 0.995


class Calibration:
    """Corrects path probabilities: of nodes with such a probability, how many were accepted for each one promised.

    Old observations fade, so that a kind of node that was given up is tried again.
    """

    def __init__(self) -> None:
        self._promised = [0.0] * _GRADES
        self._accepted = [0.0] * _GRADES

    def chance(self, promised: float, grade: int) -> float:
        """Of a path with this probability."""
        return min(1.0, promised * (_PRIOR + self._accepted[grade]) / (_PRIOR + self._promised[grade]))

    @staticmethod
    def grade(log_prob: float) -> int:
        """Which nodes a path's log-probability is told together with."""
        return min(int(-log_prob / _STEP), _GRADES - 1)

    def saw(self, promised: float, grade: int, accepted: bool) -> None:
        """A verified node, and whether all of its path was right."""
        self._promised[grade] += promised
        self._accepted[grade] += accepted

    def fade(self) -> None:
        """Once a round."""
        self._promised = [x * _KEEP for x in self._promised]
        self._accepted = [x * _KEEP for x in self._accepted]

    @property
    def trust(self) -> float:
        """Accepted tokens for each one promised, over all nodes."""
        return (_PRIOR + sum(self._accepted)) / (_PRIOR + sum(self._promised))
