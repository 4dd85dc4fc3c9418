"""Cross-model retrieval: a draft sees the chunks that the target attends to (SpecExtend, section 2.2).

    working cache = sink | retrieved chunks | window

After a verification, the queries of one target layer score the context's chunks. The draft sees the best ones until the
next scoring. The paper has neither sink nor window, so a draft may miss the last words; here both are always part.
This module selects entries; caches gather their KV.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from longdraft.memory.store import KVStore
from longdraft.native.boundary import CPU_INT64
from longdraft.views.view import View


class ReselectionTimer:
    """Decides when to reselect chunks, and stores the queries that score them. Slots are independent.

    Args:
        interval: verifications from one selection to the next; 0: never due.
        num_queries: the last queries to store for each slot.
    """

    def __init__(self, interval: int, num_queries: int) -> None:
        self.interval, self._num_queries = interval, num_queries
        # Slot -> verifications since the last selection.
        self._num_verifications: defaultdict[int, int] = defaultdict(int)
        self._queries: dict[int, torch.Tensor] = {}

    def add_queries(self, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Appends queries, layer -> (Hq, n, d), the newest last."""
        new, stored = torch.stack(list(queries.values())), self._queries.get(slot)
        joined = new if stored is None else torch.cat([stored, new], dim=2)
        self._queries[slot] = joined[:, :, -self._num_queries :]

    def queries(self, slot: int) -> torch.Tensor | None:
        """Returns (layers, Hq, M, d), M at most ``num_queries``; None if there are none yet."""
        return self._queries.get(slot)

    def count_verification(self, slot: int) -> None:
        """Counts a verification."""
        self._num_verifications[slot] += 1

    def is_due(self, slot: int) -> bool:
        """True if the interval is over."""
        return 0 < self.interval <= self._num_verifications[slot]

    def restart(self, slot: int) -> None:
        """Called after a selection."""
        self._num_verifications[slot] = 0

    def reset(self, slot: int) -> None:
        """Called when another sequence begins in the slot."""
        self._queries.pop(slot, None)
        self.restart(slot)


class Retrieval:
    """Selects the KV entries that a draft sees. Slots are independent.

    Args:
        view: shared by all heads. A "streaming" one has sink and window alone.
        interval: verifications from one scoring to the next; 0: chunks are scored once.
        layer: decoder layer of the target, from 0, whose queries and keys score the chunks; None: the last, as in the
            paper. Layers in the middle, with retrieval heads, find quoted passages better.
    """

    def __init__(self, view: View, interval: int = 0, layer: int | None = None) -> None:
        assert view.shared_by_heads
        self.view, self.timer, self._layer = view, ReselectionTimer(interval, view.num_queries), layer
        # By slot: the selected chunks, ascending; the end of the chunks of the last scoring; changes of the selection.
        self._selected: dict[int, list[int]] = {}
        self._scored_end: defaultdict[int, int] = defaultdict(int)
        self._versions: defaultdict[int, int] = defaultdict(int)

    def scoring_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the target layer whose queries are needed; empty if nothing is selected.

        Raises:
            ValueError: the target has no such layer.
        """
        if self._layer is not None and self._layer >= num_layers:
            raise ValueError(f"layer must be 0 to {num_layers - 1}, a layer of the target, got {self._layer}")
        return (num_layers - 1 if self._layer is None else self._layer,) if self.view.num_queries else ()

    @torch.inference_mode()
    def observe(self, store: KVStore, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Called after prefill and after each verification; scores the chunks if that is due.

        Args:
            store: the target's KV, up to the token of the newest query.
            queries: layer -> (Hq, n, d) after RoPE, for :meth:`scoring_layers`: of the prompt's last tokens, later of
                the deepest accepted node.
        """
        self.timer.add_queries(slot, queries)
        if slot in self._selected:
            self.timer.count_verification(slot)
            if not self.timer.is_due(slot):
                return
        (layer,), kv_len = queries, store.readable_len(slot)
        last_queries = self.timer.queries(slot)
        assert last_queries is not None
        keys = store.layer(layer)[0][slot, :, :kv_len].to(store.shape.dtype)
        selected = self.view.select_chunks(keys, last_queries[0])[0].tolist()
        self._versions[slot] += selected != self._selected.get(slot)
        self._selected[slot], self._scored_end[slot] = selected, self.view.candidate_chunks(kv_len).stop
        self.timer.restart(slot)

    def selected_chunks(self, slot: int) -> list[int] | None:
        """Returns the selected chunks, ascending; None if nothing has been scored yet."""
        return self._selected.get(slot)

    def selection_version(self, slot: int) -> int:
        """Returns a number that grows when the selection changes, and with :meth:`reset`."""
        return self._versions[slot]

    def kv_indices(self, slot: int, kv_len: int) -> torch.Tensor:
        """Returns the entries of a context of ``kv_len`` that the draft sees: (n,) int64 on the host, ascending.

        If the view has room for more chunks than are selected, it takes the latest chunks that were not scored: any of
        them before the first scoring, later those that have left the window since.
        """
        candidates, count = self.view.candidate_chunks(kv_len), self.view.num_chunks
        chunks = list(candidates)
        if len(chunks) > count:
            chunks = [c for c in self._selected.get(slot, ()) if c < candidates.stop]
            unscored = range(max(self._scored_end[slot], candidates.start), candidates.stop)
            chunks += unscored[max(0, len(unscored) - (count - len(chunks))) :]
        return self.view.kv_indices(torch.tensor([chunks], **CPU_INT64), kv_len)[0]

    def reset(self, slot: int) -> None:
        """Called when another sequence begins in the slot."""
        self._selected.pop(slot, None)
        self._scored_end[slot] = 0
        self._versions[slot] += 1
        self.timer.reset(slot)
