"""Drafts trees for SGLang's requests. Nothing of SGLang is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from longdraft.drafters.longspec import LongSpecDraft, LongSpecDrafter
from longdraft.errors import CapabilityError
from longdraft.plugins.followed import Followed, Requests
from longdraft.plugins.sglang.pool import rows
from longdraft.plugins.target import CopiedLayer, EngineTarget
from longdraft.trees.tree import TokenTree


class Drafting(Requests):
    """LongSpec's trees of at most ``nodes`` nodes, their root among them.

    Args:
        model_runner: SGLang's, with its pools. draft: folder.
        slots: requests that are drafted for at a time; others get their root alone.

    Raises:
        CheckpointError: the draft was made for another target.
        CapabilityError: the target has nothing that a draft could share.
        MemoryBudgetError: the copies of the last layer do not fit the memory that SGLang has left.
    """

    def __init__(self, model_runner: Any, draft: str, nodes: int, slots: int) -> None:
        own = model_runner.model_config
        super().__init__(slots, int(own.context_len))
        if getattr(model_runner, "is_hybrid_swa", False):
            raise CapabilityError(
                "LONGSPEC reads no pool of sliding windows: use NGRAM, or --disable-hybrid-swa-memory."
            )
        loaded = LongSpecDraft.load(Path(draft))
        sizes = int(own.head_dim), int(own.get_total_num_kv_heads())
        target = EngineTarget(own.hf_text_config, model_runner.model, *sizes, loaded.made_for.get("weights"))
        self.drafter = drafter = LongSpecDrafter(loaded, tree="beam", nodes=nodes - 1)
        self._layer, self._last = CopiedLayer(target, drafter, slots, self.longest), target.last
        self._runner = model_runner

    def trees(self, requests: Sequence[Any], rows_of: torch.Tensor, late: Sequence[list[int]]) -> list[TokenTree]:
        """A tree for each request of a batch that is decoded.

        Args:
            requests: SGLang's. rows_of: (B,) of each, its row of the table of places in the pool.
            late: of each, tokens that were accepted and are not in its ``output_ids`` yet.
        """
        self._keep([request.rid for request in requests])
        self._rows = rows_of
        going: list[Followed] = []
        trees: list[TokenTree] = []
        for row, (request, accepted) in enumerate(zip(requests, late, strict=True)):
            parts = request.origin_input_ids_unpadded, request.output_ids, accepted
            length = sum(map(len, parts))
            trees.append(TokenTree((_last(parts, 1)[0],), (-1,)))
            followed = None
            if length < self.longest:
                followed = self._follow(request.rid, row, length, None, partial(_last, parts))
            if followed is not None:
                going.append(followed)
        for followed, tree in zip(going, self._draft(going), strict=True):
            trees[followed.row] = tree
        return trees

    def prepare(self, followed: list[Followed]) -> None:
        pool, table = self._runner.token_to_kv_pool, self._runner.req_to_token_pool.req_to_token
        keys, values = pool.get_key_buffer(self._last), pool.get_value_buffer(self._last)
        for each in followed:
            places = table[self._rows[each.row]]

            def read(start: int, stop: int, places: torch.Tensor = places) -> tuple[torch.Tensor, torch.Tensor]:
                return rows(keys, places[start:stop]), rows(values, places[start:stop])

            self._layer.copy(each, read)

    def forget(self) -> None:
        """Forgets all requests: SGLang's cache was emptied."""
        self._keep(())


def _last(parts: Sequence[Sequence[int]], count: int) -> list[int]:
    """The last tokens of a text in parts, without joining all of it."""
    newest = chain.from_iterable(reversed(part) for part in reversed(parts))
    return list(islice(newest, count))[::-1]
