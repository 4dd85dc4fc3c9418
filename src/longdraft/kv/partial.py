"""The partial cache: the selection of a sequence's KV that partial verification attends to (SpecPV, section 3.2).

    sink | retrieval | window | buffer

One segment a layer and KV head, in the text's order: the first blocks, the blocks that the last full verification's
queries want most (each KV head its own), everything from the window's first block to the end, and behind it the
buffer: tokens that partial verification accepted and no full verification has seen. Keys keep the RoPE of their true
positions. The window starts at a block's border, so it takes the incomplete block and up to a block more: no position
before the buffer is out of reach of selection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from longdraft.kv.scorers import REDUCTIONS, SCORERS, LayerBlocks, block_scores
from longdraft.kv.store import KVStore
from longdraft.kv.summaries import BlockSummaries


@dataclass(frozen=True)
class PartialLayout:
    """Sizes of a partial cache, in tokens.

    Attributes:
        budget: retrieved tokens; what the paper calls SpecPV-4K has 4,096.
        sink, window: the first and the last tokens, always there.
        block: tokens that are selected together; all sizes are multiples of it.
        margin: tokens that may wait for a full verification.
        selector: one of ``SCORERS``; "streaming" retrieves nothing. reduction: one of ``REDUCTIONS``.

    Raises:
        ValueError: for sizes that make no layout, or names that are not known.
    """

    budget: int = 1024
    sink: int = 32
    window: int = 128
    block: int = 16
    margin: int = 20
    selector: str = "minmax"
    reduction: str = "mean"

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block must be at least 1, got {self.block}")
        for name in ("budget", "sink", "window"):
            size = getattr(self, name)
            if size < 0 or size % self.block:
                raise ValueError(f"{name} must be a multiple of block ({self.block} tokens), got {size}")
        if self.window < self.block:
            raise ValueError(f"window must hold a block of {self.block} tokens at least, got {self.window}")
        if self.margin < 1:
            raise ValueError(f"margin must be at least 1 token, got {self.margin}")
        if self.selector not in SCORERS:
            raise ValueError(f"selector must be one of {', '.join(SCORERS)}, got {self.selector!r}")
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {self.reduction!r}")
        if self.retrieved < self.sink + self.window and self.selector != "streaming":
            raise ValueError(
                f"budget must be at least sink + window ({self.sink + self.window} tokens), got {self.budget}; "
                "selector 'streaming' retrieves nothing."
            )

    @property
    def retrieved(self) -> int:
        """Tokens that are really retrieved."""
        return 0 if SCORERS[self.selector] is None else self.budget

    @property
    def total(self) -> int:
        """Length from which on a partial cache holds less than the text."""
        return self.sink + self.retrieved + self.window

    def segment(self, length: int) -> int:
        """Rows that a text of this length fills before the buffer."""
        return length if length <= self.total else self.sink + self.retrieved + length - self.window_start(length)

    def window_start(self, length: int) -> int:
        """The window's first position: a block's border."""
        return max(self.sink, (length - self.window) // self.block * self.block)

    def capacity(self, nodes: int) -> int:
        """Rows a slot takes: segment, tokens in waiting, and a tree of ``nodes`` nodes."""
        return self.total + self.block + self.margin + 2 * nodes


class PartialCache:
    """The partial caches of a batch.

    Args:
        full: the store with all KV.
        new_store: builds a store from (slots, capacity).
        nodes: largest tree, root included.

    Attributes:
        store: rows ``[0, segment)`` of a slot are copies of the full store's, the committed rows behind them the tokens
            in waiting. A verification on it needs ``bases``: a row's position is not its index.
        selected: slot -> (layers, kv_heads, blocks), the block indices last retrieved.
    """

    def __init__(
        self, full: KVStore, new_store: Callable[[int, int], KVStore], layout: PartialLayout, nodes: int
    ) -> None:
        self.full, self.layout = full, layout
        self.store = new_store(full.slots, layout.capacity(nodes))
        self.summaries = BlockSummaries(full, layout.block)
        self.selected: dict[int, torch.Tensor] = {}
        self._segments = [0] * full.slots

    def in_use(self, slot: int) -> bool:
        """Whether a slot has been filled since it was closed."""
        return self._segments[slot] > 0

    def waiting(self, slot: int) -> int:
        """Tokens in the slot's buffer."""
        return self.store.lengths[slot] - self._segments[slot] if self.in_use(slot) else 0

    def close(self, slot: int) -> None:
        """Forgets what the slot holds."""
        self._segments[slot] = 0
        self.store.truncate(slot, 0)
        self.summaries.truncate(slot)

    def refresh(self, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Fills a slot anew from the full store's committed rows; the buffer is empty then.

        Args:
            queries: layer -> (Hq, M, d) after RoPE, whose blocks are retrieved; M >= 1.
        """
        layout, full, length = self.layout, self.full, self.full.lengths[slot]
        self.summaries.truncate(slot)
        self.summaries.update(slot)
        start = layout.window_start(length)
        first, behind = layout.sink // layout.block, start // layout.block
        wanted = min(layout.retrieved // layout.block, behind - first)
        found = []
        device = self.store.device
        outer = torch.arange(layout.sink, device=device), torch.arange(start, length, device=device)
        for layer in range(full.shape.layers):
            blocks = self._select(slot, layer, queries[layer], first, behind, wanted)
            inner = (blocks[..., None] * layout.block + torch.arange(layout.block, device=device)).flatten(1)
            rows = torch.cat([x if x.ndim == 2 else x.expand(len(inner), -1) for x in (outer[0], inner, outer[1])], 1)
            self._copy(slot, layer, rows)
            found.append(blocks)
        self.selected[slot] = torch.stack(found)
        self._segments[slot] = rows.shape[1]
        self.store.lengths[slot] = rows.shape[1]

    def _select(
        self, slot: int, layer: int, queries: torch.Tensor, first: int, behind: int, wanted: int
    ) -> torch.Tensor:
        """(Hkv, wanted) indices of the best blocks in ``[first, behind)``, in order."""
        kv_heads, device = self.full.shape.kv_heads, self.store.device
        if wanted >= behind - first:
            return torch.arange(first, behind, device=device).expand(kv_heads, -1)
        scorer = SCORERS[self.layout.selector]
        if not wanted or scorer is None:
            return torch.empty(kv_heads, 0, dtype=torch.long, device=device)
        s = self.summaries
        part = [x[layer, slot, :, first:behind] for x in (s.largest, s.smallest, s.mean)]

        def keys() -> torch.Tensor:
            return self.full.layer(layer)[0][slot, :, : self.full.lengths[slot]]

        blocks = LayerBlocks(part[0], part[1], part[2], keys, first, self.layout.block)
        scores = block_scores(scorer, self.layout.reduction, queries, blocks)
        return scores.topk(wanted, dim=-1).indices.sort(-1).values + first

    def _copy(self, slot: int, layer: int, rows: torch.Tensor) -> None:
        """Copies rows (Hkv, n) of the full store, each KV head its own, to the slot's beginning."""
        n = rows.shape[1]
        for source, target in zip(self.full.layer(layer), self.store.layer(layer), strict=True):
            for head, own in enumerate(rows):
                target[slot, head, :n] = source[slot, head].index_select(0, own)

    def keep(self, slot: int, path: list[int]) -> None:
        """Commits the accepted path of a partial verification to the buffer, and shows it to drafters.

        The rows become unverified rows of the full store: inexact, overwritten by the next full verification.
        """
        start = self.store.lengths[slot]
        waiting = self.waiting(slot)
        self.store.commit(slot, path)
        own = slice(start, start + len(path))
        features = None if self.store.features is None else self.store.features[slot, own]
        keys, values = self.store.keys[:, slot, :, own], self.store.values[:, slot, :, own]
        self.full.put_rows(slot, self.full.lengths[slot] + waiting, keys, values, features)
        self.full.unverified[slot] = waiting + len(path)
