"""Whether something pays, found out by doing it and not doing it in turn.

What it brings shows after a cycle of several rounds (SpecPV: from one full pass to the next), so it is judged by tokens
a second over whole cycles. The better way goes on; the other one is tried again later, ever more seldom while it loses.
"""

from __future__ import annotations

# Cycles without that are timed together: they are single rounds.
ROUNDS = 4
# Tokens until the worse way is tried again, and how much longer that takes each time it loses.
AGAIN, LONGER = 64, 2
# How fast a way's speed follows what is seen.
FOLLOW = 0.5


class Trial:
    """Two ways to decode, ``on`` and off, of which the faster is to go on.

    Attributes:
        on: which is to be taken now.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self._speeds: dict[bool, float] = {}
        self._tokens, self._seconds, self._cycles = 0, 0.0, 0
        self._since, self._wait = 0, AGAIN

    def saw(self, tokens: int, seconds: float, ended: bool, plain: float) -> None:
        """A round the way that was to be taken.

        Args:
            tokens: that came of it. ended: whether a cycle ended with it.
            plain: tokens a second that the way off makes at least.
        """
        self._tokens += tokens
        self._seconds += seconds
        self._since += tokens
        self._cycles += ended
        if not ended or self._cycles < (1 if self.on else ROUNDS):
            return
        speed = self._tokens / max(self._seconds, 1e-9)
        known = self._speeds.get(self.on, speed)
        self._speeds[self.on] = known + FOLLOW * (speed - known)
        self._tokens, self._seconds, self._cycles = 0, 0.0, 0
        other = self._speeds.get(not self.on, plain if self.on else None)
        if other is None or other > self._speeds[self.on]:
            self.on, self._since = not self.on, 0
        elif self._since >= self._wait:
            self.on, self._since = not self.on, 0
            self._wait *= LONGER
