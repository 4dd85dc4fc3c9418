"""The scheduler admits sequences to the slots of the KV cache, and takes turns between prefill and decoding."""

from __future__ import annotations

from collections import deque

from longdraft.engine.cache_manager import CacheManager, OpenStore
from longdraft.engine.sequence import Sequence


class Scheduler:
    """Keeps the unfinished sequences, and decides which of them take part in a step.

    Attributes:
        waiting: sequences without a slot, in order of arrival.
        active: sequences with a slot, in order of arrival.
    """

    def __init__(self, cache_manager: CacheManager) -> None:
        self._cache_manager = cache_manager
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []
        self._last_was_prefill = False

    @property
    def sequences(self) -> list[Sequence]:
        """All unfinished sequences."""
        return [*self.active, *self.waiting]

    def schedule(self, open_store: OpenStore) -> tuple[list[Sequence], bool]:
        """Admits waiting sequences. Returns the sequences of the next step, and whether it is a prefill: by turns, if
        there are prompts to read and sequences to decode."""
        self._cache_manager.check_owner(has_active=bool(self.active))
        self._admit(open_store)
        prefilling = [s for s in self.active if s.in_prefill]
        decoding = [s for s in self.active if not s.in_prefill]
        is_prefill = bool(prefilling) and not (decoding and self._last_was_prefill)
        self._last_was_prefill = is_prefill
        return (prefilling if is_prefill else decoding), is_prefill

    def _admit(self, open_store: OpenStore) -> None:
        """Gives free slots to waiting sequences. The cache is opened only while no sequence is active."""
        while self.waiting:
            if not self.active and self._cache_manager.must_open_for(self.waiting[0]):
                self._cache_manager.open(self.waiting, open_store)
            if not self._cache_manager.assign_slot(self.waiting[0]):
                return
            self.active.append(self.waiting.popleft())

    def remove(self, s: Sequence) -> bool:
        """Takes a sequence out of the queue, or frees its slot. Returns True if it had a slot."""
        if s in self.waiting:
            self.waiting.remove(s)
            return False
        self.active.remove(s)
        self._cache_manager.free_slot(s)
        return True
