"""Cross-model retrieval: a draft sees the chunks of a text that the target looks at (SpecExtend, section 2.2).

    working cache = sink | retrieved chunks | window

After a verification, the queries of one layer of the target score the chunks of the text; the best are shown to the
draft until the next scoring. The paper keeps neither sink nor window, so a draft may miss the last words; here both are
always there. This module chooses rows; caches gather their KV.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from longdraft.memory.store import KVStore
from longdraft.native.boundary import CPU_INT64
from longdraft.views.view import View


class ReselectionTimer:
    """Decides when to choose anew, and keeps the queries that choose. One for a run; slots do not affect each other.

    Args:
        interval: verifications from one choice to the next; 0: only the other rule counts.
        count: the last queries of a text that are kept.
    """

    def __init__(self, interval: int, num_queries: int) -> None:
        self.interval, self._count = interval, num_queries
        # Verifications of each slot since the last choice.
        self._seen: defaultdict[int, int] = defaultdict(int)
        self._queries: dict[int, torch.Tensor] = {}

    def add_queries(self, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Appends queries, layer -> (Hq, n, d), the newest last."""
        new, before = torch.stack(list(queries.values())), self._queries.get(slot)
        queries_so_far = new if before is None else torch.cat([before, new], dim=2)
        self._queries[slot] = queries_so_far[:, :, -self._count :]

    def queries(self, slot: int) -> torch.Tensor | None:
        """Returns (layers, Hq, M, d), M at most ``num_queries``; None if there are none yet."""
        return self._queries.get(slot)

    def count_verification(self, slot: int) -> None:
        """Counts a verification."""
        self._seen[slot] += 1

    def is_due(self, slot: int) -> bool:
        """True if it is time to choose."""
        return 0 < self.interval <= self._seen[slot]

    def restart(self, slot: int) -> None:
        """Called when the slot's view was chosen."""
        self._seen[slot] = 0

    def reset(self, slot: int) -> None:
        """Called when another text begins in the slot."""
        self._queries.pop(slot, None)
        self.restart(slot)


class Retrieval:
    """Chooses the rows of each slot that a draft sees. One for a run; slots do not affect each other.

    Args:
        view: shared by all heads. A "streaming" one shows sink and window alone.
        interval: verifications from one scoring to the next; 0: chunks are scored once.
        layer: decoder layer of the target, from 0, whose queries and keys score the chunks; None: the last, as in the
            paper. Layers in the middle, where heads look things up, find better what will be quoted.
    """

    def __init__(self, view: View, interval: int = 0, layer: int | None = None) -> None:
        assert view.shared_by_heads
        self.view, self.timer, self._layer = view, ReselectionTimer(interval, view.num_queries), layer
        # Of each slot: the retrieved chunks, sorted, once they were scored; the end of the chunks that took part in the
        # last scoring; the number of changes of the choice.
        self._chosen: dict[int, list[int]] = {}
        self._scored: defaultdict[int, int] = defaultdict(int)
        self._versions: defaultdict[int, int] = defaultdict(int)

    def scoring_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layer that scores, of a target with so many; empty if nothing is chosen.

        Raises:
            ValueError: the target has no such layer.
        """
        if self._layer is not None and self._layer >= num_layers:
            raise ValueError(
                f"layer must be one of the target's {num_layers}, 0 to {num_layers - 1}, got {self._layer}"
            )
        return (num_layers - 1 if self._layer is None else self._layer,) if self.view.num_queries else ()

    @torch.inference_mode()
    def observe(self, store: KVStore, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Called after the prompt and after each verification; scores the chunks when that is due.

        Args:
            store: the target's, readable up to the newest query's own row.
            queries: layer -> (Hq, n, d) after RoPE, for :meth:`scoring_layers`: of the prompt's last tokens, later of the
                deepest accepted node.
        """
        self.timer.add_queries(slot, queries)
        if slot in self._chosen:
            self.timer.count_verification(slot)
            if not self.timer.is_due(slot):
                return
        (layer,), length = queries, store.readable_len(slot)
        last_queries = self.timer.queries(slot)
        assert last_queries is not None
        keys = store.layer(layer)[0][slot, :, :length].to(store.shape.dtype)
        chosen = self.view.select_chunks(keys, last_queries[0])[0].tolist()
        self._versions[slot] += chosen != self._chosen.get(slot)
        self._chosen[slot], self._scored[slot] = chosen, self.view.candidate_chunks(length).stop
        self.timer.restart(slot)

    def selected_chunks(self, slot: int) -> list[int] | None:
        """Returns the chosen chunks, sorted; None if nothing has been scored yet."""
        return self._chosen.get(slot)

    def selection_version(self, slot: int) -> int:
        """A number that grows whenever the choice changes, and with :meth:`reset`."""
        return self._versions[slot]

    def kv_indices(self, slot: int, kv_len: int) -> torch.Tensor:
        """Returns the rows of a text of ``kv_len`` rows that are seen, (n,) int64 on the host: sorted, none twice.

        A text that has room is seen whole. If fewer chunks are chosen than there is room for, the latest unscored ones
        fill it: before the first scoring any, later those that have left the window since.
        """
        between, count = self.view.candidate_chunks(kv_len), self.view.num_chunks
        chunks = list(between)
        if len(chunks) > count:
            chunks = [c for c in self._chosen.get(slot, ()) if c < between.stop]
            unscored = range(max(self._scored[slot], between.start), between.stop)
            chunks += unscored[max(0, len(unscored) - (count - len(chunks))) :]
        return self.view.kv_indices(torch.tensor([chunks], **CPU_INT64), kv_len)[0]

    def reset(self, slot: int) -> None:
        """Forgets a slot: another text begins there."""
        self._chosen.pop(slot, None)
        self._scored[slot] = 0
        self._versions[slot] += 1
        self.timer.reset(slot)
