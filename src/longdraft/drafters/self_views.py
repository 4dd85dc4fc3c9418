"""What a model sees of its own KV when it drafts for itself: which rows of a text, each layer and KV head its own.

    sink | chosen rows | window

All of them at their true positions. The first rows and the last are always there; those between are chosen by what the
model's last queries look for. One row of scores over all keys says it: q . k of a token, the mean of q . k over a
chunk, which is q . mean(K), or the softmax mass that a window of queries lays on a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

VIEWS = ("streaming", "snapkv", "chunks", "tokens")
BUDGET = 512
# StreamingLLM's first tokens, which MagicDec and TokenSwift take over.
SINK = 16
# SnapKV's window, whose queries choose (MagicDec, section 4), and how many neighbours their scores are averaged over.
WINDOW, POOL = 32, 5
# TriForce, section 4.1.
CHUNK = 8


@dataclass(frozen=True)
class SparseView:
    """A rule that chooses rows.

    Attributes:
        kind: "streaming" chooses none between sink and window; "snapkv", by the softmax mass that the last ``window``
            queries lay on each row, summed, averaged over ``POOL`` neighbours, summed over the query heads of a KV
            head's group; "chunks", whole chunks by q . mean(K) of the newest query; "tokens", rows by q . k of the
            newest query. The latter two are averaged over the group.
        budget: rows of a layer and KV head, sink and window among them.
        sink, window: the first and the last rows, always there.
        chunk: rows that "chunks" chooses together; its window begins at a chunk's border, up to a chunk earlier.

    Raises:
        ValueError: no such kind, or sizes that make no view.
    """

    kind: str
    budget: int
    sink: int
    window: int
    chunk: int

    def __post_init__(self) -> None:
        if self.kind not in VIEWS:
            raise ValueError(f"view must be {', '.join(VIEWS[:-1])} or {VIEWS[-1]}, got {self.kind!r}")
        sizes = {"budget": (self.budget, 1), "sink": (self.sink, 0), "window": (self.window, 1)}
        for name, (size, least) in (sizes | {"chunk": (self.chunk, 1)}).items():
            if type(size) is not int or size < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {size!r}")
        if self.budget < self.sink + self.window:
            raise ValueError(
                f"budget must be at least sink + window ({self.sink + self.window} tokens), got {self.budget}: give a "
                "larger budget, or a smaller sink and window"
            )
        if self.kind != "chunks":
            return
        if self.sink % self.chunk:
            raise ValueError(f"sink must be a multiple of chunk ({self.chunk} tokens), got {self.sink}")
        if self.budget < self.sink + self.window + self.chunk:
            raise ValueError(
                f"budget must be at least sink + window + chunk ({self.sink + self.window + self.chunk} tokens) for a "
                f"chunk to be chosen, got {self.budget}"
            )

    @property
    def most(self) -> int:
        """Rows that are chosen at most."""
        return self.budget + (self.chunk - 1 if self.kind == "chunks" else 0)

    @property
    def looks(self) -> int:
        """How many of a text's last queries it chooses by."""
        return {"streaming": 0, "snapkv": self.window}.get(self.kind, 1)

    def window_start(self, length: int) -> int:
        """The window's first row in a text of ``length`` rows, ``length`` > :attr:`budget`."""
        start = length - self.window
        return start // self.chunk * self.chunk if self.kind == "chunks" else start

    def rows(self, keys: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        """The rows of one layer that are seen, of a text longer than the budget.

        Args:
            keys: (Hkv, n, d) after RoPE, n > :attr:`budget`.
            queries: (Hq, M, d) after RoPE, the newest last, M >= 1; None: nobody has looked yet, the latest rows do.

        Returns:
            (Hkv, m) int64, each head's rows sorted, none twice, the last n - :meth:`window_start` of them the window;
            m is the same for all layers of a text, and at most :attr:`most`.
        """
        n = keys.shape[1]
        start = self.window_start(n)
        count = self.budget - self.sink - self.window
        size = self.chunk if self.kind == "chunks" else 1
        best = torch.empty(len(keys), 0, dtype=torch.long, device=keys.device)
        if self.kind != "streaming" and count >= size:
            wanted = count // size
            if queries is None:
                units = torch.arange((start - self.sink) // size, device=keys.device).expand(len(keys), -1)[:, -wanted:]
            else:
                scores = self._scores(keys[:, :start], queries)[:, self.sink :]
                scores = scores.unflatten(1, (-1, size)).mean(-1)
                units = scores.topk(wanted, dim=-1).indices.sort(-1).values
            best = (self.sink + units[..., None] * size + torch.arange(size, device=keys.device)).flatten(1)
        outer = [torch.arange(a, b, device=keys.device).expand(len(keys), -1) for a, b in ((0, self.sink), (start, n))]
        return torch.cat([outer[0], best, outer[1]], dim=1)

    def _scores(self, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """(Hkv, rows) float32 of keys (Hkv, rows, d) for queries (Hq, M, d)."""
        grouped = queries.float().unflatten(0, (len(keys), -1))  # (Hkv, G, M, d)
        if self.kind != "snapkv":
            # Scores are linear in q: the mean over the group's heads is that of their mean query.
            return torch.stack([k.float() @ q[:, -1].mean(0) for k, q in zip(keys, grouped, strict=True)])
        scale = grouped.shape[-1] ** -0.5
        found = []
        for k, q in zip(keys, grouped, strict=True):  # a head at a time: the masses of all are large
            mass = torch.softmax(q.flatten(0, 1) @ k.float().T * scale, -1).unflatten(0, q.shape[:2]).sum(1)
            # Averaged before the group is summed, as after: both are linear.
            pooled = torch.nn.functional.avg_pool1d(mass.sum(0)[None], POOL, 1, POOL // 2)
            found.append(pooled[0])
        return torch.stack(found)


def sparse_view(view: str, budget: int | None, sink: int | None, window: int | None, chunk: int | None) -> SparseView:
    """A view from a drafter's options, None for those that were not given.

    Args:
        budget: 512 by default; of "streaming" with a window, as many as that makes.
        sink: 16 by default, as many of the first chunks as hold so many with "chunks".
        window: 32 by default; with "streaming", all that the budget leaves.
        chunk: 8 by default; of "chunks" alone.

    Raises:
        ValueError: no such view, sizes that make none, or a chunk of another view.
    """
    if chunk is not None and view != "chunks":
        raise ValueError("chunk shapes view=chunks: give that view too")
    size = CHUNK if chunk is None else chunk
    if sink is None:
        whole = view == "chunks" and type(size) is int and size > 0
        sink = -(-SINK // size) * size if whole else SINK
    if view == "streaming" and type(sink) is int and type(window) is int and budget is None:
        budget = sink + window
    budget = BUDGET if budget is None else budget
    if window is None:
        rest = budget - sink if type(budget) is int and type(sink) is int else WINDOW
        # What is too small is refused for what it is, not for the window that nobody gave.
        window = max(rest, 1) if view == "streaming" else WINDOW
    return SparseView(view, budget, sink, window, size)
