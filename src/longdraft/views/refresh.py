"""When a view is chosen anew: every few verifications, and earlier when drafts fare badly.

Beside this rule, a view is chosen anew whenever it has no room for new rows.
"""

from __future__ import annotations

from collections import defaultdict

# The last verifications are few enough to follow a change of topic, and half of what is usual is clearly less.
LAST, CLEARLY = 2, 0.5


class Refresh:
    """One for a run; slots do not know of each other.

    Args:
        every: verifications from one choice to the next; 0: none are enough.
        adaptive: choose earlier when acceptance falls: when the last two verifications accepted less than half of the
            mean since the last choice.

    Raises:
        ValueError: ``adaptive`` is no truth value.
    """

    def __init__(self, every: int, adaptive: bool = False) -> None:
        if type(adaptive) is not bool:
            raise ValueError(f"adaptive must be True or False, got {adaptive!r}")
        self.every, self.adaptive = every, adaptive
        # Drafted tokens that each verification since the last choice accepted.
        self._accepted: defaultdict[int, list[int]] = defaultdict(list)

    def note(self, slot: int, accepted: int) -> None:
        """Told of a verification, and how many drafted tokens it accepted."""
        self._accepted[slot].append(accepted)

    def due(self, slot: int) -> bool:
        """Whether it is time to choose."""
        found = self._accepted[slot]
        if self.every and len(found) >= self.every:
            return True
        if not self.adaptive or len(found) <= LAST:
            return False
        return sum(found[-LAST:]) / LAST < CLEARLY * sum(found) / len(found)

    def done(self, slot: int) -> None:
        """Told that the slot's view was chosen, or that another text begins there."""
        self._accepted[slot] = []
