"""Drafts trees for SGLang's requests, without importing SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from longdraft.drafters.longspec import LongSpecDraft, LongSpecDrafter
from longdraft.errors import CapabilityError
from longdraft.trees.tree import TokenTree
from longdraft_engines.requests import RequestTracker, Tracked
from longdraft_engines.target import CopiedLayer, EngineTarget


class Drafting(RequestTracker):
    """Drafts LongSpec's trees of at most ``nodes`` nodes, with their root.

    Args:
        model_runner: SGLang's, with its pools. draft: folder.
        slots: how many requests are drafted for at a time; others get trees of their root alone.

    Raises:
        CheckpointError: the draft was made for another target.
        CapabilityError: the target's embedding or head cannot be shared, or its pool has sliding windows.
        MemoryBudgetError: the copies of the last layer do not fit the memory that SGLang leaves.
    """

    def __init__(self, model_runner: Any, draft: str, nodes: int, slots: int) -> None:
        described = model_runner.model_config
        super().__init__(slots, int(described.context_len))
        if getattr(model_runner, "is_hybrid_swa", False):
            raise CapabilityError(
                "LONGSPEC reads no pool of sliding windows: use NGRAM, or --disable-hybrid-swa-memory."
            )
        loaded = LongSpecDraft.load(Path(draft))
        sizes = int(described.head_dim), int(described.get_total_num_kv_heads())
        target = EngineTarget(described.hf_text_config, model_runner.model, *sizes, loaded.made_for.get("weights"))
        self.drafter = drafter = LongSpecDrafter(loaded, tree="beam", nodes=nodes - 1)
        self._layer, self._last = CopiedLayer(target, drafter, slots, self.longest), target.last
        self._runner = model_runner

    def trees(self, requests: Sequence[Any], rows_of: torch.Tensor, late: Sequence[list[int]]) -> list[TokenTree]:
        """A tree for each request of a batch.

        Args:
            requests: SGLang's. rows_of: (B,) their rows in the table of places in the pool.
            late: the accepted tokens of each that are not in its ``output_ids`` yet.
        """
        self._forget_others([request.rid for request in requests])
        self._rows = rows_of
        drafted: list[Tracked] = []
        trees: list[TokenTree] = []
        for row, (request, accepted) in enumerate(zip(requests, late, strict=True)):
            parts = request.origin_input_ids_unpadded, request.output_ids, accepted
            length = sum(map(len, parts))
            trees.append(TokenTree((_last(parts, 1)[0],), (-1,)))
            if length < self.longest:
                tracked = self._track(request.rid, row, length, None, partial(_last, parts))
                if tracked is not None:
                    drafted.append(tracked)
        for tracked, tree in zip(drafted, self._draft(drafted), strict=True):
            trees[tracked.row] = tree
        return trees

    def prepare(self, tracked: list[Tracked]) -> None:
        pool, table = self._runner.token_to_kv_pool, self._runner.req_to_token_pool.req_to_token
        keys, values = pool.get_key_buffer(self._last), pool.get_value_buffer(self._last)
        for request in tracked:
            places = table[self._rows[request.row]]

            def read(start: int, stop: int, places: torch.Tensor = places) -> tuple[torch.Tensor, torch.Tensor]:
                return rows(keys, places[start:stop]), rows(values, places[start:stop])

            self._layer.copy(request, read)

    def forget(self) -> None:
        """Forgets all requests, as SGLang has emptied its cache."""
        self._forget_others(())


def _last(parts: Sequence[Sequence[int]], count: int) -> list[int]:
    """The last tokens of a text in parts, without joining them all."""
    newest = chain.from_iterable(reversed(part) for part in reversed(parts))
    return list(islice(newest, count))[::-1]


def rows(buffer: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(kv_heads, n, head_dim) rows of n tokens in a pool's keys or values.

    Args:
        buffer: (rows, kv_heads, head_dim), or in pages (pages, kv_heads, page, head_dim).
        places: (n,) row of each token, counted through the pages.

    Raises:
        CapabilityError: the pool has another layout, or is quantised.
    """
    if buffer.dim() not in (3, 4) or not buffer.dtype.is_floating_point or buffer.dtype.itemsize < 2:
        raise CapabilityError(
            f"A KV pool of {tuple(buffer.shape)} in {buffer.dtype} is not read here: use SGLang's NGRAM."
        )
    places = places.to(buffer.device, torch.long)
    if buffer.dim() == 3:
        return buffer[places].transpose(0, 1)
    page = buffer.shape[2]
    return buffer[places // page, :, places % page].transpose(0, 1)
