"""Whether to speculate at all: what it brought lately, against plain decoding."""

from __future__ import annotations

# What a round leaves of the rounds before it; how much a fresh judgement weighs, in plain steps.
_KEEP, _PRIOR = 0.9, 3.0
# Rounds that a trial lasts at least, at first and after one that went badly; rounds of plain decoding after a bad one,
# at first and at most.
_TRIAL, _DOUBTFUL, _PAUSE, _LONGEST = 6, 3, 48, 512
# Below the first, speculation is given up; above the second, an earlier failure is forgotten; below the third, a trial
# that is likely to fail is over after two rounds.
_BAD, _GOOD, _HOPELESS = 1.0, 1.05, 0.85


class Gate:
    """Open while speculation pays. Closed, it opens for a trial after ever longer pauses.

    A trial costs little: trees shrink to what is believed in, and pauses double until one goes well.

    Args:
        doubtful: a failure is likely, and success brings little: the first trial is a short one, and pauses are longer.
    """

    def __init__(self, doubtful: bool = False) -> None:
        self._shortest = 2 * _PAUSE if doubtful else _PAUSE
        self._pause, self._next, self._trial = 0, self._shortest, _DOUBTFUL if doubtful else _TRIAL
        self._reset()

    def _reset(self) -> None:
        self._tokens = self._cost = _PRIOR
        self._rounds = 0

    def begin(self, doubtful: bool = False) -> None:
        """A new text: what held for the last one may not hold for it, but is a hint.

        Args:
            doubtful: a failure is likely for this one: its first trial is a short one.
        """
        self._pause = 0
        if doubtful:
            self._trial = _DOUBTFUL
        self._next = max(self._shortest, self._next // 4)
        self._reset()

    def open(self) -> bool:
        """Whether to speculate in this round. Asked once a round."""
        if self._pause:
            self._pause -= 1
            return False
        return True

    @property
    def gain(self) -> float:
        """Tokens for each token that plain decoding would have made in the same time."""
        return self._tokens / self._cost

    def saw(self, tokens: float, cost: float) -> None:
        """A round of speculation.

        Args:
            tokens: emitted, a sequence. cost: its time, in plain steps.
        """
        self._tokens = _KEEP * self._tokens + tokens
        self._cost = _KEEP * self._cost + cost
        self._rounds += 1
        hopeless = self._trial == _DOUBTFUL and self._rounds >= 2 and self.gain < _HOPELESS
        if hopeless or (self._rounds >= self._trial and self.gain < _BAD):
            self._pause, self._trial = self._next, _DOUBTFUL
            self._next = min(2 * self._next, _LONGEST)
            self._reset()
        elif self._rounds >= 3 * _TRIAL and self.gain > _GOOD:
            self._next, self._trial = self._shortest, _TRIAL
