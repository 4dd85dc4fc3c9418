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

from longdraft.views.scorers import SCORERS, Candidates, score

# Dtypes that keys and values may be rounded to.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def check_sizes(least: int, **sizes: object) -> None:
    """Raises ValueError for a size that is no whole number of at least ``least``."""
    for name, size in sizes.items():
        if type(size) is not int or size < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {size!r}")


def check_multiples(unit: str, of: int, **sizes: int) -> None:
    """Raises ValueError for a size that is no multiple of ``of`` tokens, the value of the option ``unit``."""
    for name, size in sizes.items():
        if size % of:
            raise ValueError(f"{name} must be a multiple of {unit} ({of} tokens), got {size}")


def dtype_of(name: str | None, option: str = "view_dtype") -> torch.dtype | None:
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
        chosen: rows of chosen chunks at most; as many whole chunks as they make.
        sink, window: the first and the last rows, always there.
        chunk: rows that are chosen together; 1: each row for itself.
        room: new rows that are taken in before the view is chosen anew.
        reduction: one of ``REDUCTIONS``: how the scores of several queries become one.
        shared: whether all KV heads see the same rows; else each chooses its own.

    Raises:
        ValueError: sizes that make no view.
    """

    scorer: str
    chosen: int
    sink: int
    window: int
    chunk: int = 1
    room: int = 0
    reduction: str = "mean"
    shared: bool = False

    def __post_init__(self) -> None:
        check_sizes(0, chosen=self.chosen, sink=self.sink, room=self.room)
        check_sizes(1, window=self.window, chunk=self.chunk)
        check_multiples("chunk", self.chunk, sink=self.sink)

    @property
    def budget(self) -> int:
        """Rows that the view holds, without new ones: a text of no more is seen whole."""
        return self.sink + self.chosen + self.window

    @property
    def capacity(self) -> int:
        """Rows that it holds at most, with new ones and a window that starts early."""
        return self.budget + self.chunk - 1 + self.room

    @property
    def chunks(self) -> int:
        """Number of chosen chunks at most."""
        return 0 if SCORERS[self.scorer] is None else self.chosen // self.chunk

    def __str__(self) -> str:
        """Its sizes as the bench prints them: sink + chunks x rows of each + window."""
        chunks = f" + {self.chunks:,} x {self.chunk}" if self.chunks else ""
        return f"{self.sink:,}{chunks} + {self.window:,}"

    @property
    def query_count(self) -> int:
        """Number of a text's last queries that choose the chunks."""
        scorer = SCORERS[self.scorer]
        if scorer is None:
            return 0
        return self.window if scorer.window else 1

    def window_start(self, length: int) -> int:
        """First row of the window in a text of ``length`` rows; ``length`` if the sink holds all of the text."""
        return max(min(self.sink, length), (length - self.window) // self.chunk * self.chunk)

    def between(self, length: int) -> range:
        """The chunks between sink and window."""
        return range(self.sink // self.chunk, self.window_start(length) // self.chunk)

    def unscored(self, length: int, has_queries: bool) -> range | None:
        """Returns the chunks that are chosen without scores, the latest ones; None if scores have to choose."""
        between = self.between(length)
        count = min(self.chunks, len(between))
        scored = has_queries and 0 < count < len(between)
        return None if scored else between[len(between) - count :]

    def choose(
        self, keys: torch.Tensor, queries: torch.Tensor | None, kept: Mapping[str, torch.Tensor] | None = None
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
        latest = self.unscored(length, queries is not None)
        if latest is not None:
            chunks = torch.arange(latest.start, latest.stop, device=keys.device)
            return chunks.expand(*keys.shape[:-3], 1 if self.shared else keys.shape[-3], -1)
        assert queries is not None
        between = self.between(length)
        candidates = Candidates(keys, between.start, between.stop, self.chunk, kept)
        scores = score(self.scorer, self.reduction, queries, candidates)
        if self.shared:
            scores = scores.mean(-2, keepdim=True)
        return scores.topk(self.chunks, dim=-1).indices.sort(-1).values + between.start

    def rows_of(self, chunks: torch.Tensor, length: int) -> torch.Tensor:
        """Returns the rows (..., m) int64 of chosen chunks (..., c), with sink and window: sorted, none twice."""
        each = torch.arange(self.chunk, device=chunks.device)
        inner = (chunks[..., None] * self.chunk + each).flatten(-2)
        ends = ((0, min(self.sink, length)), (self.window_start(length), length))
        sink, window = (torch.arange(a, b, device=chunks.device).expand(*inner.shape[:-1], -1) for a, b in ends)
        return torch.cat([sink, inner, window], dim=-1)

    def rows(
        self, keys: torch.Tensor, queries: torch.Tensor | None, kept: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Chooses the rows of a layer, (Hkv or 1, m), with sink and window; arguments as in :meth:`choose`."""
        return self.rows_of(self.choose(keys, queries, kept), keys.shape[-2])
