"""The KV that a draft sees under retrieval: the target's at true positions, or its own at compact ones.

    sink | retrieved chunks | window | rows since then

Rows are gathered when the choice of chunks has changed, or when the rows since then have filled their room; in between,
new rows are appended. All rows of the text are kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from longdraft.memory.store import KVShape, KVStore
from longdraft.model.key_rotation import turned
from longdraft.views.cache import Queries, TrueCache
from longdraft.views.copied import Copied, gather
from longdraft.views.retrieval import Retrieval
from longdraft.views.window import Window

# (T,) numbers of positions -> cos and sin (T, d) of the rotations by them, unscaled and in float32.
Turns = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class RetrievedKV(TrueCache):
    """The target's last-layer KV on the retrieved rows, keys with the RoPE of their true positions.

    Args:
        full: the target's store.
        transposed_keys: the layout that the attention path prefers.

    Raises:
        MemoryBudgetError: it does not fit the memory that is free.
    """

    def __init__(self, full: KVStore, retrieval: Retrieval, transposed_keys: bool) -> None:
        def new_store(slots: int, capacity: int) -> KVStore:
            return KVStore(replace(full.shape, layers=1), slots, capacity, full.device, transposed_keys)

        super().__init__(full, new_store, retrieval.view, 0, first=full.shape.layers - 1, summaries=False)
        self.retrieval = retrieval
        self._versions: list[int | None] = [None] * full.slots

    def _chosen(self, slot: int, end: int, queries: Queries | None) -> torch.Tensor:
        return torch.tensor([[self.retrieval.visible_chunks(slot, end)]], dtype=torch.long, device=self.full.device)

    def forget(self, slot: int, start: int = 0) -> None:
        if start < self._copied.ends[slot]:
            self._versions[slot] = None  # so that the whole window is gathered again
        super().forget(slot, start)

    def read(self, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Returns visible keys and values (slots, Hkv, capacity, d) as tensor views, and the rows of each slot.

        Args:
            slots: are brought up to the rows that can be read now.
        """
        for slot in slots:
            version = self.retrieval.version(slot)
            self.update(slot, due=self._versions[slot] != version)
            self._versions[slot] = version
        return *self.store.layer(0), [self.store.lengths[slot] for slot in slots]


class CompactWindow(Window):
    """A :class:`~longdraft.views.window.Window` that keeps the whole text and attends to a part of it at positions
    0, 1, 2, ..., so that a draft meets no position beyond those of its training.

    Keys come with the RoPE of their true positions and are kept so. A gathered key is rotated further, by the
    difference to its place; so are queries and the keys of the tree. Rotations compose, and a factor that YaRN puts on
    cos and sin stays unchanged.

    Row t of an EAGLE draft joins the target's hidden state at position t with the next token. So chunks of the target's
    positions are the same chunks of rows, and text and rows have the same length.

    Args:
        rows: of the longest text.
        scratch: tree nodes of one round whose K/V are kept.
        depth: levels of the deepest tree: a query is at most the view's capacity + ``depth`` positions from a key.
        turns: makes rotations by differences of positions.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        rows: int,
        scratch: int,
        device: torch.device | str,
        retrieval: Retrieval,
        depth: int,
        turns: Turns,
    ) -> None:
        super().__init__(shape, slots, rows, 0, device)
        self.together = False  # rows are gathered and rotated slot by slot
        capacity = retrieval.view.capacity
        # With `depth` rows to spare it is never full, so that nodes of any level see the oldest keys.
        self.near = Window(shape, slots, capacity + depth, scratch, device)
        self._copied = Copied(slots, capacity)
        self._retrieval, self._turns, self._device = retrieval, turns, device
        self._versions: list[int | None] = [None] * slots

    def forget(self, slot: int, end: int) -> None:
        super().forget(slot, end)
        if end < self._copied.ends[slot]:
            self._versions[slot] = None
        self._copied.forget(slot, end)

    def gather(self, slot: int) -> None:
        """Brings the gathered rows of a slot up to the newest one."""
        end, version = self.end(slot), self._retrieval.version(slot)
        if self._copied.appends(slot, end, due=self._versions[slot] != version):
            _, new = self._copied.append(slot, end)
            rows = torch.arange(new.start, new.stop, device=self._device)
        else:
            rows = self._retrieval.rows(slot, end).to(self._device)
            self._copied.fill(slot, len(rows), self._retrieval.view.window_start(end), end)
        self._versions[slot] = version
        kept = self._copied.sizes[slot] - len(rows)
        places = torch.arange(kept, kept + len(rows), device=self._device)
        k, v = (gather(x[slot], rows[None]) for x in (self.keys, self.values))
        self.near.append(slot, kept, self._turned(k, places - rows), v)

    def attend_newest(self, slot: int, q: torch.Tensor) -> torch.Tensor:
        """Attends with the newest row's query (Hq, 1, d) to all gathered rows -> (Hq, 1, d)."""
        self.gather(slot)
        return self.near.attend_newest(slot, self._moved(slot, q))

    def attend_level(
        self,
        slot: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ancestors: torch.Tensor,
        depth: int,
    ) -> torch.Tensor:
        """Attends as :meth:`Window.attend_level`, with the gathered rows."""
        return self.near.attend_level(slot, self._moved(slot, q), self._moved(slot, k), v, ancestors, depth)

    def _moved(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """Rotates rows (H, T, d) that follow the gathered ones to their places behind them."""
        shift = self._copied.sizes[slot] - self._copied.ends[slot]
        return self._turned(x, torch.full((1,), shift, device=self._device, dtype=torch.long)) if shift else x

    def _turned(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return turned(x, *self._turns(by))
