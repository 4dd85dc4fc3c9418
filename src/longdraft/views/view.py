"""Views: which KV entries of a long context are attended to.

    sink | selected chunks | window | new entries

The first entries (sink) and the last (window) always belong to a view. Between them, chunks are selected by the scores
that queries give them (:mod:`longdraft.views.scorers`), by each KV head or by all heads together. New
entries follow the window until the chunks are selected anew.

Chunks lie on a fixed grid: chunk i is entries [i * chunk_size, (i + 1) * chunk_size). The window starts at a chunk
boundary, up to a chunk earlier than its size says, so every entry before it belongs to a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longdraft.views.scorers import SCORERS, CandidateChunks, score_chunks

# Dtypes that the keys and values of a view may be rounded to, by the option's value.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def check_sizes(minimum: int, **sizes: object) -> None:
    """Raises ValueError unless all sizes are integers of at least ``minimum``."""
    for name, size in sizes.items():
        if type(size) is not int or size < minimum:
            raise ValueError(f"{name} must be a whole number of at least {minimum}, got {size!r}")


def check_multiples(unit: str, divisor: int, **sizes: int) -> None:
    """Raises ValueError unless all sizes are multiples of ``divisor`` tokens, the value of the option ``unit``."""
    for name, size in sizes.items():
        if size % divisor:
            raise ValueError(f"{name} must be a multiple of {unit} ({divisor} tokens), got {size}")


def parse_dtype(name: str | None, option: str = "view_dtype") -> torch.dtype | None:
    """Returns the dtype of that name, None for None; raises ValueError, naming ``option``, for other names."""
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"{option} must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


@dataclass(frozen=True)
class View:
    """Settings of a view. Sizes count KV entries of one layer and KV head.

    Attributes:
        scorer: one of ``SCORERS``; "streaming" selects no chunks.
        num_selected: most entries of selected chunks, rounded down to whole chunks.
        sink: number of first entries, which are always part of the view.
        window: number of last entries, which are too.
        chunk_size: entries of a chunk.
        max_new: most new entries that are appended before chunks are selected anew.
        reduction: how the scores of several queries become one, see ``REDUCTIONS``.
        shared_by_heads: whether all KV heads have the same entries; else each KV head selects its own.

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

    def __post_init__(self) -> None:
        check_sizes(0, num_selected=self.num_selected, sink=self.sink, max_new=self.max_new)
        check_sizes(1, window=self.window, chunk=self.chunk_size)
        check_multiples("chunk", self.chunk_size, sink=self.sink)

    @property
    def size(self) -> int:
        """Entries without new entries. A context of at most this length belongs to the view in full."""
        return self.sink + self.num_selected + self.window

    @property
    def capacity(self) -> int:
        """Most entries, with new entries and a window that starts up to a chunk early."""
        return self.size + self.chunk_size - 1 + self.max_new

    @property
    def num_chunks(self) -> int:
        """Most selected chunks."""
        return 0 if SCORERS[self.scorer] is None else self.num_selected // self.chunk_size

    def __str__(self) -> str:
        """The sizes as the bench prints them: sink + chunks x chunk_size + window."""
        chunks = f" + {self.num_chunks:,} x {self.chunk_size}" if self.num_chunks else ""
        return f"{self.sink:,}{chunks} + {self.window:,}"

    @property
    def num_queries(self) -> int:
        """Number of the context's last tokens whose queries score the chunks."""
        scorer = SCORERS[self.scorer]
        if scorer is None:
            return 0
        return self.window if scorer.uses_window_queries else 1

    def window_start(self, kv_len: int) -> int:
        """First entry of the window in a context of ``kv_len``; ``kv_len`` if the sink covers the context."""
        return max(min(self.sink, kv_len), (kv_len - self.window) // self.chunk_size * self.chunk_size)

    def candidate_chunks(self, kv_len: int) -> range:
        """The range of chunks between sink and window."""
        return range(self.sink // self.chunk_size, self.window_start(kv_len) // self.chunk_size)

    def unscored_chunks(self, kv_len: int, has_queries: bool) -> range | None:
        """Returns the latest chunks, if they are selected without scores; None if scores are needed."""
        candidates = self.candidate_chunks(kv_len)
        count = min(self.num_chunks, len(candidates))
        needs_scores = has_queries and 0 < count < len(candidates)
        return None if needs_scores else candidates[len(candidates) - count :]

    def select_chunks(
        self, keys: torch.Tensor, queries: torch.Tensor | None, summaries: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Selects the chunks of a layer. All tensors may have a leading dimension for several layers.

        Args:
            keys: (Hkv, n, d), after RoPE.
            queries: (Hq, M, d), after RoPE, the newest last, M >= 1; None: the latest chunks are selected.
            summaries: of the context's chunks, see :class:`~longdraft.views.scorers.CandidateChunks`.

        Returns:
            (Hkv, c) int64 chunk indices, ascending; (1, c) if shared by heads. c depends on n alone.
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
        return scores.topk(self.num_chunks, dim=-1).indices.sort(-1).values + candidate_range.start

    def kv_indices(self, chunks: torch.Tensor, kv_len: int) -> torch.Tensor:
        """Returns the indices (..., m) int64 of sink, chunks (..., c) and window, ascending."""
        in_chunk = torch.arange(self.chunk_size, device=chunks.device)
        selected = (chunks[..., None] * self.chunk_size + in_chunk).flatten(-2)
        ends = ((0, min(self.sink, kv_len)), (self.window_start(kv_len), kv_len))
        sink, window = (torch.arange(a, b, device=chunks.device).expand(*selected.shape[:-1], -1) for a, b in ends)
        return torch.cat([sink, selected, window], dim=-1)

    def select_kv_indices(
        self, keys: torch.Tensor, queries: torch.Tensor | None, summaries: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Selects the entries of a layer: indices (Hkv or 1, m). Arguments as in :meth:`select_chunks`."""
        return self.kv_indices(self.select_chunks(keys, queries, summaries), keys.shape[-2])
