"""The cache manager opens the prompt cache for a run, and lends its slots to sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError, MemoryBudgetError
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.runner import TargetRunner

logger = logging.getLogger("longdraft")

# (cache, slots, capacity, fingerprint of the target): opens a cache, and binds all parts of a run to its KV store. May
# raise MemoryBudgetError. An argument of calls, not an attribute: a cycle of references would keep the store alive.
OpenStore = Callable[[PromptCache, int, int, str], None]


class CacheManager:
    """Lends the slots of a prompt cache to sequences, and allocates more memory when sequences are longer.

    Args:
        runner: the target.
        cache: the user's prompt cache; None: a new one.
        slots: maximum number of slots; halved until their KV fits the memory.
        capacity: context length of each slot in the first allocation; more if a waiting sequence is longer.

    Attributes:
        cache: the prompt cache.
        keeps_outputs: True if the cache is the user's. The engine's own cache keeps only prompts: the KV of outputs was
            not computed in full chunks, so the last bits may differ.
    """

    def __init__(self, runner: TargetRunner, cache: PromptCache | None, slots: int, capacity: int) -> None:
        self.keeps_outputs = cache is not None
        self.cache = PromptCache() if cache is None else cache
        self.slots = slots
        self._runner, self._capacity = runner, capacity
        self._free_slots: list[int] = []
        self._open_count = -1  # the cache's open_count after this run opened the cache; -1: not open
        self._fingerprint = ""  # fingerprint of the target when the cache was opened

    @property
    def is_open(self) -> bool:
        """True if this run has opened the cache."""
        return self._open_count >= 0

    @property
    def owns_cache(self) -> bool:
        """True if no other run has opened the cache since this run did."""
        return self.cache.open_count == self._open_count

    def must_open_for(self, s: Sequence) -> bool:
        """Returns True if the cache has to be opened before ``s`` can start. If the model has changed since the last
        request, for example by an adapter, the old KV is invalid."""
        is_too_small = not self.is_open or s.max_length > self._capacity
        return is_too_small or self._fingerprint != self._runner.synced_fingerprint()

    def open(self, waiting: Iterable[Sequence], open_store: OpenStore) -> None:
        """Opens the cache with slots that are long enough for all waiting sequences. No slot may be in use.

        Raises:
            MemoryBudgetError: not even one sequence fits.
        """
        self._fingerprint = self._runner.synced_fingerprint()
        # Grow by half at least. Otherwise each slightly longer sequence would need a new store.
        grown = min(3 * self._capacity // 2, self._runner.context_length) if self.is_open else self._capacity
        capacity, slots = max([grown, *(s.max_length for s in waiting)]), self.slots
        while True:
            try:
                open_store(self.cache, slots, capacity, self._fingerprint)
                break
            except MemoryBudgetError:
                if slots == 1 or self.keeps_outputs:  # a user's cache is not replaced
                    raise
                logger.warning("There is no memory for %d sequences at a time: decoding %d.", slots, slots // 2)
                slots, self.cache = slots // 2, PromptCache()
        self._capacity, self._open_count = capacity, self.cache.open_count
        self._free_slots = list(range(slots))

    def assign_slot(self, s: Sequence) -> bool:
        """Gives a sequence the free slot that has most of its prompt. Returns False if there is no slot for it now."""
        if not self._free_slots or s.max_length > self._capacity:
            return False
        regime = self._runner.rope_regime(len(s.prompt))
        s.slot = self.cache.choose_slot(self._free_slots, s.prompt[:-1], regime)
        self._free_slots.remove(s.slot)
        return True

    def free_slot(self, s: Sequence) -> None:
        """Takes a sequence's slot back, and records which KV the slot holds."""
        self._free_slots.append(s.slot)
        if s.is_started and self.owns_cache:
            self.cache.record_tokens(s.slot, s.tokens if self.keeps_outputs else s.prompt)

    def check_owner(self, has_active: bool) -> None:
        """Notices if another run has opened the cache. Raises CapabilityError if this run has active sequences."""
        if not self.is_open or self.owns_cache:
            return
        self._open_count = -1
        if has_active:
            raise CapabilityError(
                "Another run has opened this run's PromptCache while this run was decoding. Give each run its own "
                "PromptCache, or finish or close one run before the next begins."
            )
