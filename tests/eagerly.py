"""Schedules of SpecPV that go over to the partial cache at once; tests/engine/test_schedules.py compares them."""

from __future__ import annotations


class Eagerly:
    """Goes over to the partial cache at once, though the text would fit it."""

    def mode(self, sequence):
        slot = sequence.slot
        if not self.partial.in_use(slot):
            return "refresh"
        return "partial" if self.partial.waiting(slot) <= self._margin(sequence) else "refresh"

    def _commit_full(self, sequence, path, rows):
        slot = sequence.slot
        self.store.commit(slot, path)
        queries = self._queries.pop(slot)
        self.partial.choose(slot, {layer: q[:, list(rows)] for layer, q in queries.items()})
