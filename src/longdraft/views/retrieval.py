"""Cross-model retrieval: a draft attends to the chunks that the target attends to (SpecExtend, section 2.2).

    working cache = sink | retrieved chunks | window

After a verification, the queries of one target layer score the context's chunks. The draft attends to the best chunks
until the next scoring. The paper has no sink and no window; here they keep the first and last entries visible. This
module selects entries; KV caches gather the selected KV. Shapes: Hq query heads, n tokens, head size d.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from longdraft.memory.store import KVStore
from longdraft.native.boundary import CPU_INT64
from longdraft.views.view import View


class ReselectionTimer:
    """Decides when chunks are selected again, and stores the queries that score the chunks. Slots are independent.

    Args:
        interval: number of verifications from one selection to the next; 0: chunks are selected only once.
        num_queries: number of last queries to store for each slot.
    """

    def __init__(self, interval: int, num_queries: int) -> None:
        self.interval, self._num_queries = interval, num_queries
        # Slot -> number of verifications since the last selection.
        self._num_verifications: defaultdict[int, int] = defaultdict(int)
        self._queries: dict[int, torch.Tensor] = {}

    def add_queries(self, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Appends the ``queries`` of new tokens: layer -> (Hq, n, d), the newest token last."""
        new_queries, stored = torch.stack(list(queries.values())), self._queries.get(slot)
        all_queries = new_queries if stored is None else torch.cat([stored, new_queries], dim=2)
        self._queries[slot] = all_queries[:, :, -self._num_queries :]

    def queries(self, slot: int) -> torch.Tensor | None:
        """Returns the slot's last queries (layers, Hq, up to num_queries, d); None if the slot has no queries yet."""
        return self._queries.get(slot)

    def count_verification(self, slot: int) -> None:
        """Counts a verification of the slot."""
        self._num_verifications[slot] += 1

    def is_due(self, slot: int) -> bool:
        """Returns True if ``interval`` verifications have passed since the last selection."""
        return 0 < self.interval <= self._num_verifications[slot]

    def expire(self, slot: int) -> None:
        """Ends the interval, unless chunks are selected only once."""
        self._num_verifications[slot] = self.interval

    def restart(self, slot: int) -> None:
        """Begins a new interval after a selection. Keeps the queries."""
        self._num_verifications[slot] = 0

    def reset(self, slot: int) -> None:
        """Drops the queries and begins a new interval; called when another sequence begins in the slot."""
        self._queries.pop(slot, None)
        self.restart(slot)


class Retrieval:
    """Selects the KV entries that a draft attends to. Slots are independent.

    Args:
        view: the view that the selection fills, shared by all heads. The scorer "streaming" selects no chunks.
        interval: number of verifications from one scoring to the next; 0: chunks are scored once, after prefill.
        layer: index of the target's decoder layer whose queries and keys score the chunks; None: the last layer, as in
            the paper. Middle layers find quoted passages better, because they have retrieval heads.
    """

    def __init__(self, view: View, interval: int = 0, layer: int | None = None) -> None:
        assert view.shared_by_heads
        self.view, self.timer, self._layer = view, ReselectionTimer(interval, view.num_queries), layer
        # By slot:
        self._selected: dict[int, list[int]] = {}  # selected chunks, ascending
        self._scored_end: defaultdict[int, int] = defaultdict(int)  # the last scoring covered chunks before this one
        self._versions: defaultdict[int, int] = defaultdict(int)  # number of changes of the selection

    def scoring_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the target layer whose queries score the chunks, as a tuple; empty if the view selects no chunks.

        Raises:
            ValueError: the target has no such layer.
        """
        if self._layer is not None and self._layer >= num_layers:
            raise ValueError(f"layer must be 0 to {num_layers - 1}, a layer of the target, got {self._layer}")
        return (num_layers - 1 if self._layer is None else self._layer,) if self.view.num_queries else ()

    @torch.inference_mode()
    def observe(self, store: KVStore, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Scores the chunks if a new selection is due; called after prefill and after each verification.

        Args:
            store: the target's KV, up to the token of the newest query.
            slot: the slot of the sequence.
            queries: layer -> (Hq, n, d) after RoPE, for :meth:`scoring_layers`. After prefill these are the queries of
                the prompt's last tokens, after a verification the query of the deepest accepted node.
        """
        self.timer.add_queries(slot, queries)
        if slot in self._selected:
            self.timer.count_verification(slot)
            if not self.timer.is_due(slot):
                return
        (layer,) = queries  # scoring_layers is one layer
        kv_len = store.readable_len(slot)
        last_queries = self.timer.queries(slot)
        assert last_queries is not None
        keys = store.layer(layer)[0][slot, :, :kv_len].to(store.shape.dtype)
        selected = self.view.select_chunks(keys, last_queries[0])[0].tolist()
        self._versions[slot] += selected != self._selected.get(slot)
        self._selected[slot], self._scored_end[slot] = selected, self.view.candidate_chunks(kv_len).stop
        self.timer.restart(slot)

    def selected_chunks(self, slot: int) -> list[int] | None:
        """Returns the selected chunks, ascending; None before the first scoring."""
        return self._selected.get(slot)

    def selection_version(self, slot: int) -> int:
        """Returns a number that grows when the selection changes, or :meth:`reset` is called."""
        return self._versions[slot]

    def kv_indices(self, slot: int, kv_len: int) -> torch.Tensor:
        """Returns the entries of a context of ``kv_len`` that the draft attends to: (n,) int64 on the host, ascending.

        If fewer chunks are selected than the view may have, the latest chunks without scores are added. Before the
        first scoring no chunk has scores; later the chunks that have left the window since the last scoring have none.
        """
        candidates, max_chunks = self.view.candidate_chunks(kv_len), self.view.num_chunks
        chunks = list(candidates)
        if len(chunks) > max_chunks:
            chunks = [c for c in self._selected.get(slot, ()) if c < candidates.stop]
            unscored = range(max(self._scored_end[slot], candidates.start), candidates.stop)
            num_missing = max_chunks - len(chunks)
            chunks += unscored[max(0, len(unscored) - num_missing) :]
        return self.view.kv_indices(torch.tensor([chunks], **CPU_INT64), kv_len)[0]

    def reset(self, slot: int) -> None:
        """Forgets the selection and the queries of a slot; called when another sequence begins in the slot."""
        self._selected.pop(slot, None)
        self._scored_end[slot] = 0
        self._versions[slot] += 1
        self.timer.reset(slot)
