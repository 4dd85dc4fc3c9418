"""A view selects the KV entries of a long context that a forward attends to.

    sink | selected chunks | window | new entries

The first entries (sink) and the last entries (window) always belong to a view. Between sink and window, queries score
the chunks (:mod:`longdraft.views.scorers`), and each KV head selects the best chunks, or all heads select together.
New entries follow the window until chunks are selected anew.

Chunk i is entries [i * chunk_size, (i + 1) * chunk_size). The window is extended to the left up to a chunk boundary, so
it may have up to chunk_size - 1 more entries. Shapes: Hkv KV heads, Hq query heads, n entries, M query tokens, c
selected chunks, head size d.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longdraft.native.quantized_kv import INT4
from longdraft.options import whole_number
from longdraft.views.scorers import SCORERS, CandidateChunks, score_chunks

# Value of the option view_dtype -> dtype to which the keys and values of a view are rounded.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": INT4}
# A view that grows with the context selects one in so many of its entries (SpecPV's are 2K to 8K of up to 60K).
SELECTED_SHARE = 8


def check_multiples(divisor_name: str, divisor: int, **sizes: int) -> None:
    """Raises ValueError unless all sizes are multiples of ``divisor``, the value of the option ``divisor_name``."""
    for name, size in sizes.items():
        if size % divisor:
            raise ValueError(f"{name} must be a multiple of {divisor_name} ({divisor} tokens), got {size}")


def parse_dtype(name: str | None, option: str = "view_dtype") -> torch.dtype | None:
    """Returns the dtype of a name in ``DTYPES``, None for None; raises ValueError that names ``option`` otherwise."""
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"{option} must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


@dataclass(frozen=True)
class View:
    """The settings of a view. Sizes are numbers of KV entries of one layer and KV head.

    Attributes:
        scorer: one of ``SCORERS``; "streaming" selects no chunks.
        num_selected: maximum number of entries in selected chunks, rounded down to full chunks.
        sink: number of first entries that always belong to the view.
        window: number of last entries that always belong to the view.
        chunk_size: number of entries of a chunk.
        max_new: maximum number of new entries before chunks are selected anew.
        reduction: how the scores of several queries become one, see ``REDUCTIONS``.
        shared_by_heads: True if all KV heads of a layer select the same chunks.
        min_selected: None: as many entries at every length. A number: 1 in ``SELECTED_SHARE`` entries of the context,
            at least ``min_selected`` and at most ``num_selected``.

    Raises:
        ValueError: a size is out of range.
    """

    scorer: str
    num_selected: int
    sink: int
    window: int
    chunk_size: int = 1
    max_new: int = 0
    reduction: str = "mean"
    shared_by_heads: bool = False
    min_selected: int | None = None

    def __post_init__(self) -> None:
        whole_number("num_selected", self.num_selected, 0)
        whole_number("sink", self.sink, 0)
        whole_number("max_new", self.max_new, 0)
        whole_number("window", self.window, 1)
        whole_number("chunk", self.chunk_size, 1)
        check_multiples("chunk", self.chunk_size, sink=self.sink)

    @property
    def size(self) -> int:
        """Fewest entries without new entries. A view of a context up to this length is the whole context."""
        return self.sink + (self.num_selected if self.min_selected is None else self.min_selected) + self.window

    @property
    def capacity(self) -> int:
        """Maximum number of entries, including new entries and an extended window."""
        return self.sink + self.num_selected + self.window + self.chunk_size - 1 + self.max_new

    @property
    def num_chunks(self) -> int:
        """Maximum number of selected chunks."""
        return 0 if SCORERS[self.scorer] is None else self.num_selected // self.chunk_size

    def num_chunks_at(self, kv_len: int) -> int:
        """Returns the maximum number of selected chunks in a context of ``kv_len`` entries."""
        if self.min_selected is None:
            return self.num_chunks
        return min(self.num_chunks, max(self.min_selected, kv_len // SELECTED_SHARE) // self.chunk_size)

    def __str__(self) -> str:
        """Returns the sizes as the bench prints them: sink + chunks x chunk_size + window."""
        least = "" if self.min_selected is None else f"{self.min_selected // self.chunk_size:,} to "
        chunks = f" + {least}{self.num_chunks:,} x {self.chunk_size}" if self.num_chunks else ""
        return f"{self.sink:,}{chunks} + {self.window:,}"

    @property
    def num_queries(self) -> int:
        """Number of the context's last tokens whose queries score the chunks."""
        scorer = SCORERS[self.scorer]
        if scorer is None:
            return 0
        return self.window if scorer.uses_window_queries else 1

    def window_start(self, kv_len: int) -> int:
        """Returns the first entry of the window in a context of ``kv_len`` entries; ``kv_len`` if the sink has all."""
        return max(min(self.sink, kv_len), (kv_len - self.window) // self.chunk_size * self.chunk_size)

    def candidate_chunks(self, kv_len: int) -> range:
        """Returns the range of chunks between sink and window."""
        return range(self.sink // self.chunk_size, self.window_start(kv_len) // self.chunk_size)

    def unscored_chunks(self, kv_len: int, has_queries: bool) -> range | None:
        """Returns the chunks to select without scores, which are the latest chunks; None if scores are needed."""
        candidates = self.candidate_chunks(kv_len)
        num_selected = min(self.num_chunks_at(kv_len), len(candidates))
        needs_scores = has_queries and 0 < num_selected < len(candidates)
        return None if needs_scores else candidates[len(candidates) - num_selected :]

    def select_chunks(
        self, keys: torch.Tensor, queries: torch.Tensor | None, summaries: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Selects the chunks of a layer. All tensors may have a leading dimension for several layers.

        Args:
            keys: (Hkv, n, d) keys of the context, after RoPE.
            queries: (Hq, M, d), after RoPE, the newest token last; None: the latest chunks are selected.
            summaries: summaries of the context's chunks, see :class:`~longdraft.views.scorers.CandidateChunks`.

        Returns:
            (Hkv, c) int64 chunk indices, ascending; (1, c) if ``shared_by_heads``.
        """
        kv_len = keys.shape[-2]
        latest = self.unscored_chunks(kv_len, queries is not None)
        if latest is not None:
            chunks = torch.arange(latest.start, latest.stop, device=keys.device)
            return chunks.expand(*keys.shape[:-3], 1 if self.shared_by_heads else keys.shape[-3], -1)
        assert queries is not None
        candidate_range = self.candidate_chunks(kv_len)
        candidates = CandidateChunks(keys, candidate_range.start, candidate_range.stop, self.chunk_size, summaries)
        scores = score_chunks(self.scorer, self.reduction, queries, candidates)
        if self.shared_by_heads:
            scores = scores.mean(-2, keepdim=True)
        return scores.topk(self.num_chunks_at(kv_len), dim=-1).indices.sort(-1).values + candidate_range.start

    def kv_indices(self, chunks: torch.Tensor, kv_len: int) -> torch.Tensor:
        """Returns the indices (..., entries) int64 of sink, ``chunks`` (..., c) and window, ascending."""
        in_chunk = torch.arange(self.chunk_size, device=chunks.device)
        selected = (chunks[..., None] * self.chunk_size + in_chunk).flatten(-2)
        ranges = ((0, min(self.sink, kv_len)), (self.window_start(kv_len), kv_len))
        sink, window = (torch.arange(*r, device=chunks.device).expand(*selected.shape[:-1], -1) for r in ranges)
        return torch.cat([sink, selected, window], dim=-1)

    def select_kv_indices(
        self, keys: torch.Tensor, queries: torch.Tensor | None, summaries: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Returns the indices (Hkv or 1, entries) of a layer's view. The arguments are as in :meth:`select_chunks`."""
        return self.kv_indices(self.select_chunks(keys, queries, summaries), keys.shape[-2])
