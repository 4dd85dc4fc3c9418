"""A trial of two ways to decode: both are taken in turn, and the faster goes on.

The gain shows after a cycle of several rounds (SpecPV: from one full pass to the next), so speeds are in tokens a
second over whole cycles. The slower way is tried again later, ever more seldom while it loses.
"""

from __future__ import annotations

# Cycles of the way off that are timed together: they are single rounds.
ROUNDS = 4
# Tokens until the slower way is tried again, and the factor by which that grows each time it loses.
AGAIN, LONGER = 64, 2
# Weight of a new measurement in a way's speed.
FOLLOW = 0.5


class Trial:
    """Decides between a way to decode, and its absence.

    Attributes:
        on: whether to take that way now.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self._speeds: dict[bool, float] = {}
        self._tokens, self._seconds, self._cycles = 0, 0.0, 0
        self._tokens_since_switch, self._patience = 0, AGAIN

    def observe(self, tokens: int, seconds: float, cycle_ended: bool, plain: float) -> None:
        """Counts a round.

        Args:
            tokens: new tokens of the round.
            plain: tokens a second that the way off makes at least.
        """
        self._tokens += tokens
        self._seconds += seconds
        self._tokens_since_switch += tokens
        self._cycles += cycle_ended
        if not cycle_ended or self._cycles < (1 if self.on else ROUNDS):
            return
        speed = self._tokens / max(self._seconds, 1e-9)
        known = self._speeds.get(self.on, speed)
        self._speeds[self.on] = known + FOLLOW * (speed - known)
        self._tokens, self._seconds, self._cycles = 0, 0.0, 0
        other = self._speeds.get(not self.on, plain if self.on else None)
        faster = other is None or other > self._speeds[self.on]
        if faster or self._tokens_since_switch >= self._patience:
            self.on, self._tokens_since_switch = not self.on, 0
            if not faster:
                self._patience *= LONGER
