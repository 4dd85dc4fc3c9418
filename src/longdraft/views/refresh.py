"""Refreshing a view: its chunks are chosen anew every few verifications, and earlier when drafts fare badly.

Beside this rule, a view is chosen anew whenever it has no room for new rows.
"""

from __future__ import annotations

from collections import defaultdict

# Acceptance has fallen if the last verifications, few enough to follow a change of topic, accepted less than this share
# of the mean.
LAST, FALLEN = 2, 0.5


class Refresh:
    """Decides when to choose anew. One for a run; slots do not affect each other.

    Args:
        interval: verifications from one choice to the next; 0: only the other rules count.
        adaptive: choose earlier when acceptance falls: when the last two verifications accepted less than half of the
            mean since the last choice.

    Raises:
        ValueError: ``adaptive`` is not True or False.
    """

    def __init__(self, interval: int, adaptive: bool = False) -> None:
        if type(adaptive) is not bool:
            raise ValueError(f"adaptive must be True or False, got {adaptive!r}")
        self.interval, self.adaptive = interval, adaptive
        # Accepted drafted tokens of each verification since the last choice.
        self._accepted: defaultdict[int, list[int]] = defaultdict(list)

    def note(self, slot: int, accepted: int) -> None:
        """Counts a verification that accepted so many drafted tokens."""
        self._accepted[slot].append(accepted)

    def due(self, slot: int) -> bool:
        """True if it is time to choose."""
        accepted = self._accepted[slot]
        if self.interval and len(accepted) >= self.interval:
            return True
        if not self.adaptive or len(accepted) <= LAST:
            return False
        return sum(accepted[-LAST:]) / LAST < FALLEN * sum(accepted) / len(accepted)

    def done(self, slot: int) -> None:
        """Called when the slot's view was chosen, or another text begins there."""
        self._accepted[slot] = []
