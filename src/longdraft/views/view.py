"""Views: the rows of a text that are seen.

    sink | chosen chunks | window | new rows

The first rows (sink) and the last (window) are always there. Between them, whole chunks are chosen by the score that
queries give them (:mod:`longdraft.views.scorers`): by each KV head for itself, or by all heads together. New rows stand
behind the window until the view is chosen anew.

Chunks lie on a fixed grid: chunk i is rows [i * chunk, (i + 1) * chunk). The window starts at a chunk's border, up to a
chunk earlier than its size says, so that every row before it can be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longdraft.views.scorers import SCORERS, CandidateChunks, score_chunks

# Dtypes that keys and values may be rounded to.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def check_sizes(minimum: int, **sizes: object) -> None:
    """Raises ValueError for a size that is no whole number of at least ``minimum``."""
    for name, size in sizes.items():
        if type(size) is not int or size < minimum:
            raise ValueError(f"{name} must be a whole number of at least {minimum}, got {size!r}")


def check_multiples(unit: str, divisor: int, **sizes: int) -> None:
    """Raises ValueError for a size that is no multiple of ``divisor`` tokens, the value of the option ``unit``."""
    for name, size in sizes.items():
        if size % divisor:
            raise ValueError(f"{name} must be a multiple of {unit} ({divisor} tokens), got {size}")


def parse_dtype(name: str | None, option: str = "view_dtype") -> torch.dtype | None:
    """Returns the dtype that an option names, None for None; raises ValueError for a name not in :data:`DTYPES`."""
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"{option} must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


@dataclass(frozen=True)
class View:
    """The settings of a view. Sizes are rows of one layer and KV head.

    Attributes:
        scorer: one of ``SCORERS``; "streaming" chooses no chunks.
        num_selected: rows of chosen chunks at most; as many whole chunks as they make.
        sink, window: the first and the last rows, always there.
        chunk_size: rows that are chosen together; 1: each row for itself.
        max_new: new rows that are taken in before the view is chosen anew.
        reduction: one of ``REDUCTIONS``: how the scores of several queries become one.
        shared_by_heads: whether all KV heads see the same rows; else each chooses its own.

    Raises:
        ValueError: sizes that make no view.
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
        check_sizes(0, chosen=self.num_selected, sink=self.sink, room=self.max_new)
        check_sizes(1, window=self.window, chunk=self.chunk_size)
        check_multiples("chunk", self.chunk_size, sink=self.sink)

    @property
    def size(self) -> int:
        """Rows that the view holds, without new ones: a text of no more is seen whole."""
        return self.sink + self.num_selected + self.window

    @property
    def capacity(self) -> int:
        """Rows that it holds at most, with new ones and a window that starts early."""
        return self.size + self.chunk_size - 1 + self.max_new

    @property
    def num_chunks(self) -> int:
        """Number of chosen chunks at most."""
        return 0 if SCORERS[self.scorer] is None else self.num_selected // self.chunk_size

    def __str__(self) -> str:
        """Its sizes as the bench prints them: sink + chunks x rows of each + window."""
        chunks = f" + {self.num_chunks:,} x {self.chunk_size}" if self.num_chunks else ""
        return f"{self.sink:,}{chunks} + {self.window:,}"

    @property
    def num_queries(self) -> int:
        """Number of a text's last queries that choose the chunks."""
        scorer = SCORERS[self.scorer]
        if scorer is None:
            return 0
        return self.window if scorer.uses_window_queries else 1

    def window_start(self, kv_len: int) -> int:
        """First row of the window in a text of ``kv_len`` rows; ``kv_len`` if the sink holds all of the text."""
        return max(min(self.sink, kv_len), (kv_len - self.window) // self.chunk_size * self.chunk_size)

    def candidate_chunks(self, kv_len: int) -> range:
        """The chunks between sink and window."""
        return range(self.sink // self.chunk_size, self.window_start(kv_len) // self.chunk_size)

    def unscored_chunks(self, kv_len: int, has_queries: bool) -> range | None:
        """Returns the chunks that are chosen without scores, the latest ones; None if scores have to choose."""
        between = self.candidate_chunks(kv_len)
        count = min(self.num_chunks, len(between))
        scored = has_queries and 0 < count < len(between)
        return None if scored else between[len(between) - count :]

    def select_chunks(
        self, keys: torch.Tensor, queries: torch.Tensor | None, summaries: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Chooses the chunks of a layer, or of several at once, whose dimension comes first everywhere.

        Args:
            keys: (Hkv, n, d), after RoPE.
            queries: (Hq, M, d), after RoPE, the newest last, M >= 1; None: the latest chunks are chosen.
            kept: summaries of the text's chunks, see :class:`~longdraft.views.scorers.Candidates`.

        Returns:
            (Hkv, c) int64 indices of chunks, sorted, none twice; (1, c) if they are shared. c depends on n alone.
        """
        length = keys.shape[-2]
        latest = self.unscored_chunks(length, queries is not None)
        if latest is not None:
            chunks = torch.arange(latest.start, latest.stop, device=keys.device)
            return chunks.expand(*keys.shape[:-3], 1 if self.shared_by_heads else keys.shape[-3], -1)
        assert queries is not None
        between = self.candidate_chunks(length)
        candidates = CandidateChunks(keys, between.start, between.stop, self.chunk_size, summaries)
        scores = score_chunks(self.scorer, self.reduction, queries, candidates)
        if self.shared_by_heads:
            scores = scores.mean(-2, keepdim=True)
        return scores.topk(self.num_chunks, dim=-1).indices.sort(-1).values + between.start

    def kv_indices(self, chunks: torch.Tensor, kv_len: int) -> torch.Tensor:
        """Returns the rows (..., m) int64 of chosen chunks (..., c), with sink and window: sorted, none twice."""
        each = torch.arange(self.chunk_size, device=chunks.device)
        inner = (chunks[..., None] * self.chunk_size + each).flatten(-2)
        ends = ((0, min(self.sink, kv_len)), (self.window_start(kv_len), kv_len))
        sink, window = (torch.arange(a, b, device=chunks.device).expand(*inner.shape[:-1], -1) for a, b in ends)
        return torch.cat([sink, inner, window], dim=-1)

    def select_kv_indices(
        self, keys: torch.Tensor, queries: torch.Tensor | None, summaries: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Chooses the rows of a layer, (Hkv or 1, m), with sink and window; arguments as in :meth:`select_chunks`."""
        return self.kv_indices(self.select_chunks(keys, queries, summaries), keys.shape[-2])
