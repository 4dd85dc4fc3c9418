"""Cross-model retrieval: which chunks of a long text a draft sees, by the target's attention (SpecExtend, section 2.2).

    working cache = sink | retrieved chunks | recent

The text's rows are divided into chunks at fixed borders. After a verification, one row of the target's last-layer
attention is computed again, that of the deepest accepted node: a chunk's score is the mean mass that falls on its
positions. The best chunks outside sink and recent window are shown to the draft until the next scoring. The paper
keeps neither sink nor recent window, so a draft may miss the last words; here both are always there.

This file decides which rows; what is gathered from them is the drafters' own affair.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from longdraft.kv.store import KVStore

# Adaptive scoring: the last verifications are few enough to follow a change of topic, and half their usual luck is
# clearly less.
LAST, CLEARLY = 2, 0.5
# What the paper found best for EAGLE (appendix E.1), which LongSpec's cross-attention takes over.
RETRIEVED = {"chunks": 64, "every": 8}


@dataclass
class _State:
    """One slot.

    Attributes:
        chosen: first positions of the retrieved chunks, sorted; None: nothing scored yet.
        scored: positions before this one (outside the sink) took part in the last scoring.
        accepted: drafted tokens accepted by each verification since then.
        length: rows of the text when last looked at.
    """

    chosen: list[int] | None = None
    scored: int = 0
    accepted: list[int] = field(default_factory=list)
    length: int = 0


class ChunkRetrieval:
    """Which rows of each slot a draft sees. One for a run; slots do not know of each other.

    Args:
        chunk: positions that are retrieved together.
        chunks: how many are retrieved (the paper's k).
        every: verifications from one scoring to the next.
        adaptive: score earlier when acceptance falls: when the mean of the last two verifications is less than half
            the mean since the last scoring.
        sink, recent: the first and the last rows, always there; multiples of ``chunk``. The recent rows begin at a
            chunk's border, so up to a chunk more of them are there.
        layer: decoder layer of the target, from 0, whose attention ranks the chunks; None: the last, as in the paper.
            Layers in the middle, where heads look things up, find what will be quoted better.

    Raises:
        ValueError: sizes that make no working cache.
    """

    def __init__(
        self,
        chunk: int = 32,
        chunks: int = 32,
        every: int = 4,
        adaptive: bool = False,
        sink: int = 32,
        recent: int = 128,
        layer: int | None = None,
    ) -> None:
        least = {"chunk": (chunk, 1), "chunks": (chunks, 1), "every": (every, 1), "sink": (sink, 0)}
        if layer is not None:
            least["layer"] = (layer, 0)
        for name, (size, smallest) in (least | {"recent": (recent, 1)}).items():
            if type(size) is not int or size < smallest:
                raise ValueError(f"{name} must be a whole number of at least {smallest}, got {size!r}")
        if type(adaptive) is not bool:
            raise ValueError(f"adaptive must be True or False, got {adaptive!r}")
        for name, size in (("sink", sink), ("recent", recent)):
            if size % chunk:
                raise ValueError(f"{name} must be a multiple of chunk ({chunk} tokens), got {size}")
        if chunk * chunks < sink + recent:
            raise ValueError(
                f"the retrieved chunks (chunks x chunk = {chunk * chunks} tokens) must be at least sink + recent "
                f"({sink + recent} tokens): give more chunks, or a smaller sink and recent window"
            )
        self.chunk, self.chunks, self.every, self.adaptive = chunk, chunks, every, adaptive
        self.sink, self.recent, self._layer = sink, recent, layer
        self._states: defaultdict[int, _State] = defaultdict(_State)
        self._versions: defaultdict[int, int] = defaultdict(int)

    def layer(self, layers: int) -> int:
        """Whose attention ranks the chunks, in a target of so many layers.

        Raises:
            ValueError: it has no such layer.
        """
        if self._layer is not None and self._layer >= layers:
            raise ValueError(f"layer must be one of the target's {layers}, 0 to {layers - 1}, got {self._layer}")
        return layers - 1 if self._layer is None else self._layer

    @property
    def most(self) -> int:
        """Rows of the largest working cache."""
        return self.sink + self.chunks * self.chunk + self.recent + self.chunk - 1

    def wanted(self, slot: int) -> bool:
        """Whether it is time to score: nothing has been yet, ``every`` verifications are over, or acceptance fell."""
        state = self._states[slot]
        if state.chosen is None or len(state.accepted) >= self.every:
            return True
        if not self.adaptive or len(state.accepted) <= LAST:
            return False
        last, usual = sum(state.accepted[-LAST:]) / LAST, sum(state.accepted) / len(state.accepted)
        return last < CLEARLY * usual

    @staticmethod
    @torch.inference_mode()
    def score(keys: torch.Tensor, query: torch.Tensor, chunk: int = 32) -> torch.Tensor:
        """The mean attention mass of each chunk, of one row of attention.

        Sums are float32: in half precision the small masses of a long text vanish.

        Args:
            keys: (Hkv, n, d) of one layer, after RoPE, n >= 1.
            query: (Hq, d) after RoPE, Hq a multiple of Hkv.

        Returns:
            (ceil(n / chunk),) float32. The last chunk, where incomplete, counts over the positions that it has.
        """
        kv_heads, n, d = keys.shape
        grouped = query.float().reshape(kv_heads, -1, d) * d**-0.5
        mass = torch.softmax(grouped @ keys.float().transpose(1, 2), -1).mean((0, 1))
        sums = torch.nn.functional.pad(mass, (0, -n % chunk)).view(-1, chunk).sum(-1)
        sizes = torch.full_like(sums, chunk)
        sizes[-1] = (n - 1) % chunk + 1
        return sums / sizes

    def observe(self, store: KVStore, slot: int, query: torch.Tensor) -> None:
        """Told after the prefill and after each verification; scores and selects when it is time to.

        How many drafted tokens were accepted shows in how far the text's rows have come.

        Args:
            store: the target's, committed as far as the query's own row.
            query: (Hq, d) of :meth:`layer`, after RoPE: the prompt's last token, then the deepest accepted nodes.
        """
        state, length = self._states[slot], store.readable(slot)
        if state.chosen is not None:
            state.accepted.append(max(0, length - state.length - 1))
        state.length = length
        if not self.wanted(slot):
            return
        start = self._recent_start(length)
        first, behind = self.sink // self.chunk, start // self.chunk
        chosen: list[int] = []
        if behind > first:
            keys = store.layer(self.layer(store.shape.layers))[0][slot, :, :length]
            scores = self.score(keys, query, self.chunk)[first:behind]
            best = scores.topk(min(self.chunks, behind - first)).indices.sort().values + first
            chosen = (best * self.chunk).tolist()
        if chosen != state.chosen:
            self._versions[slot] += 1
        state.chosen, state.scored, state.accepted = chosen, start, []

    def selected(self, slot: int) -> list[int] | None:
        """First positions of the chosen chunks, sorted; None: nothing has been scored yet."""
        chosen = self._states[slot].chosen
        return None if chosen is None else list(chosen)

    def version(self, slot: int) -> int:
        """Grows whenever the choice has changed, and with :meth:`reset`."""
        return self._versions[slot]

    def rows(self, slot: int, length: int) -> torch.Tensor:
        """Positions of the working cache of a text of ``length`` rows: sorted, none twice, all below ``length``.

        A text that has room is there whole. Where fewer chunks are chosen than there is room for, the latest of those
        that were not scored fill it: all of them before the first scoring, later those that have left the recent
        window since.

        Returns:
            (n,) int64 on the host, n at most :attr:`most`.
        """
        state = self._states[slot]
        start = self._recent_start(length)
        if start <= self.sink + self.chunks * self.chunk:
            return torch.arange(length)
        chosen = [c for c in state.chosen or () if c < start]
        unscored = range(max(state.scored, self.sink), start, self.chunk)
        chosen += unscored[max(0, len(unscored) - (self.chunks - len(chosen))) :]
        inner = (torch.tensor(chosen, dtype=torch.long)[:, None] + torch.arange(self.chunk)).flatten()
        return torch.cat([torch.arange(min(self.sink, length)), inner, torch.arange(start, length)])

    def reset(self, slot: int) -> None:
        """Forgets a slot: another text begins there."""
        self._states.pop(slot, None)
        self._versions[slot] += 1

    def truncate(self, slot: int, length: int) -> None:
        """Told that the text's rows from ``length`` on were taken back."""
        state, start = self._states[slot], self._recent_start(length)
        state.length = min(state.length, length)
        state.scored = min(state.scored, start)
        if state.chosen and state.chosen[-1] >= start:
            state.chosen = [c for c in state.chosen if c < start]
            self._versions[slot] += 1

    def _recent_start(self, length: int) -> int:
        """The recent window's first position: a chunk's border behind the sink, or the end of a text within it."""
        return max(min(self.sink, length), (length - self.recent) // self.chunk * self.chunk)


def retrieval_options(
    retrieval: bool, sink: int, recent: int, defaults: dict[str, int], room: int | None = None, **given: Any
) -> ChunkRetrieval | None:
    """A drafter's retrieval from its options; None where it has none.

    Args:
        sink, recent: mean nothing without retrieval, since schedules have options of these names too.
        defaults: of the options in ``given`` that are None. given: chunk, chunks, every, adaptive.
        room: rows that the draft can see at all; None: any number. By default, no more chunks than fit are taken.

    Raises:
        ValueError: sizes that make no working cache, or one larger than the room, or options of a retrieval that is
            not asked for.
    """
    if type(retrieval) is not bool:
        raise ValueError(f"retrieval must be True or False, got {retrieval!r}")
    sizes = {name: value for name, value in given.items() if value is not None}
    if not retrieval:
        if sizes:
            raise ValueError(f"{', '.join(sizes)} shape the retrieval of chunks: give retrieval=True too")
        return None
    options: dict[str, Any] = {**defaults, **sizes, "sink": sink, "recent": recent}
    found = ChunkRetrieval(**options)
    if room is None or found.most <= room:
        return found
    # A chunk's room to spare, or every new token would have the working set gathered again.
    fit = (room - found.most + found.chunks * found.chunk) // found.chunk - 1
    if "chunks" in sizes or fit < 1:
        raise ValueError(
            f"a working cache of up to {found.most} tokens does not fit the {room} that the draft's window and the "
            f"tree leave: {f'give at most {fit} chunks, or' if fit > 0 else 'give'} a smaller sink and recent window"
        )
    return ChunkRetrieval(**options | {"chunks": fit})
