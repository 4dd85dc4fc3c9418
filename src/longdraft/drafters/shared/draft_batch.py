"""The rows that are fed to a draft, and their attention to the draft's own cache and to each other.

On a GPU all sequences attend in one call, whose numbers are on the device, so it can be recorded; elsewhere they attend
one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from longdraft.attention import hybrid
from longdraft.attention.sdpa import attend_sequence
from longdraft.attention.transfer import to_device
from longdraft.drafters.shared.draft_block import ALL, OutputRows, SelfAttend
from longdraft.native.boundary import CPU_INT64
from longdraft.views.draft_cache import DraftCache


@dataclass(frozen=True)
class DraftBatch:
    """Rows of B sequences, W of each: new tokens of the text, or the nodes of a level behind them.

    Attributes:
        slots: slot of each sequence.
        width: W, rows of each sequence.
        going: the last rows of each that get an output; all rows get keys and values.
        places: the rows [begin, end) of the cache that each sequence sees, its fed rows the last of them.
        mask: (B, going, S) bool, which of the last S rows each row that goes on sees; None: all.
        behind: how many of the last rows stand for tokens not known yet, and see each other as a chain.
    """

    slots: tuple[int, ...]
    width: int
    going: int
    places: tuple[tuple[int, int], ...]
    mask: torch.Tensor | None = None
    behind: int = 0

    @classmethod
    def new(cls, cache: DraftCache, slots: Sequence[int], width: int, behind: int = 0) -> DraftBatch:
        """The newest rows of each text, of which the last one goes on, with those behind it."""
        lengths = [cache.store.lengths[slot] for slot in slots]
        places = tuple((cache.window_start(slot), n + behind) for slot, n in zip(slots, lengths, strict=True))
        going = 1 + behind
        chain = torch.ones(going, going, dtype=torch.bool, device="cpu").tril().expand(len(slots), -1, -1)
        return cls(tuple(slots), width + behind, going, places, chain if behind else None, behind)

    @classmethod
    def nodes(cls, cache: DraftCache, slots: Sequence[int], depth: int, ancestors: torch.Tensor) -> DraftBatch:
        """The nodes of a level: ``ancestors`` (B, W, S) of S nodes so far, of which these are the last W."""
        _, width, count = ancestors.shape
        places = tuple((cache.window_start(slot, depth), cache.store.lengths[slot] + count) for slot in slots)
        return cls(tuple(slots), width, width, places, ancestors)

    @property
    def longest(self) -> int:
        """Rows that a sequence sees at most."""
        return max(end - begin for begin, end in self.places)

    def outputs(self, device: torch.device | str) -> OutputRows:
        """Which of all sequences' rows go on."""
        if self.going == self.width:
            return ALL
        if len(self.slots) == 1:
            return slice(self.width - self.going, None)
        rows = torch.arange(len(self.slots) * self.width, device=device).view(-1, self.width)
        return rows[:, self.width - self.going :].flatten()

    def attends(self, cache: DraftCache) -> list[SelfAttend]:
        """The attention of each layer. All rows enter the cache; in a cache of several layers all get an output."""
        layers = cache.store.shape.layers
        if layers == 1 and attends_batched(cache):
            return [batched_attend(cache, DeviceBatch.of(cache, self), self.longest)]
        seen = [self._all(cache, i) if layers > 1 else self._seen(cache, i) for i in range(len(self.slots))]
        return [self._one_by_one(*cache.store.layer(layer), seen) for layer in range(layers)]

    def _one_by_one(self, keys: torch.Tensor, values: torch.Tensor, seen: list[_Seen]) -> SelfAttend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outputs = []
            parts = (x.split(x.shape[1] // len(self.slots), 1) for x in (q, k, v))
            for slot, (begin, end, mask), q_, k_, v_ in zip(self.slots, seen, *parts, strict=True):
                keys[slot, :, end - self.width : end], values[slot, :, end - self.width : end] = k_, v_
                outputs.append(attend_sequence(q_, keys[slot, :, begin:end], values[slot, :, begin:end], mask))
            return torch.cat(outputs, dim=1)

        return attend

    def _seen(self, cache: DraftCache, i: int) -> _Seen:
        """The part of a sequence that the rows that go on see."""
        (begin, end), mask = self.places[i], self.mask
        if mask is None:
            return begin, end, None
        whole = F.pad(mask[i], (end - begin - mask.shape[2], 0), value=True)
        return begin, end, to_device(whole, cache.store.device)

    def _all(self, cache: DraftCache, i: int) -> _Seen:
        """The part of a sequence that all rows see, each its own window of a text that is fed in pieces."""
        if self.going == self.width and not self.behind and self.mask is not None:
            return self._seen(cache, i)
        end, window = self.places[i][1], cache.window or self.places[i][1]
        first = end - self.width
        begin = max(0, first + 1 - window)
        at, keys = (torch.arange(a, end, device=cache.store.device) for a in (first, begin))
        # Rows behind the text see each other however small the window is.
        near = (at[:, None] - keys < window) | (keys >= end - self.behind)
        return begin, end, (keys <= at[:, None]) & near


# The rows [begin, end) of a slot, and which of them each query sees, (T, end - begin) bool; None: all.
_Seen = tuple[int, int, torch.Tensor | None]


def attends_batched(cache: DraftCache) -> bool:
    """True if all sequences attend in one call."""
    shape = cache.store.shape
    return shape.layers == 1 and hybrid.unavailable(cache.store.device, shape.dtype, shape.head_dim) is None


class DeviceBatch(NamedTuple):
    """Rows of a batch as tensors on the device.

    Attributes:
        into: (B, W, 2) slot and row of each fed row.
        slots, begins, lengths: (B,) int32: rows [begin, begin + length) of each slot are seen by all its queries.
        mask: (B, T, S) bool, which of the S rows behind those each of the T queries sees; S may be 0.
    """

    into: torch.Tensor
    slots: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, cache: DraftCache, rows: DraftBatch, width: int | None = None, batch: int | None = None) -> DeviceBatch:
        """Makes them, with one copy to the device.

        Args:
            width: pad the fed rows to so many a sequence, and the mask to all of the scratch space.
            batch: pad the sequences to so many. The others' rows are padding, and they see one row, of the first slot.
        """
        device, padding = cache.store.device, cache.store.capacity - 1
        mask = rows.mask
        if mask is None:
            mask = torch.empty(len(rows.slots), 1, 0, dtype=torch.bool, device=device)
        more, wide = (batch or len(rows.slots)) - len(rows.slots), width or rows.width
        into = [
            (slot, end - rows.width + i if i < rows.width else padding)
            for slot, (_, end) in zip(rows.slots, rows.places, strict=True)
            for i in range(wide)
        ]
        into += [(rows.slots[0], padding)] * wide * more
        columns = [
            [*rows.slots, *[rows.slots[0]] * more],
            [*(begin for begin, _ in rows.places), *[0] * more],
            [*(end - begin - mask.shape[2] for begin, end in rows.places), *[1] * more],
        ]
        count = len(rows.slots) + more
        # Each column begins at a multiple of 16 bytes, which kernels may rely on.
        seen = [n for each in columns for n in (*each, *[0] * (-count % 4))]
        # Integers of both widths travel together.
        into_h = torch.tensor(into, **CPU_INT64).view(torch.int32).flatten()
        numbers = to_device(torch.cat([into_h, torch.tensor(seen, dtype=torch.int32, device="cpu")]), device)
        slots_t, begins_t, lengths_t = numbers[len(into_h) :].view(3, -1)[:, :count].unbind()
        mask = to_device(mask, device)
        if width is not None:
            mask = F.pad(mask, (0, cache.scratch - mask.shape[2], 0, 0, 0, more))
        into_t = numbers[: len(into_h)].view(torch.long).view(-1, wide, 2)
        return cls(into_t, slots_t, begins_t, lengths_t, mask)


def batched_attend(cache: DraftCache, at: DeviceBatch, bound: int) -> SelfAttend:
    """Attends for all sequences at once: q (Hq, B * T, d), k and v (Hkv, B * W, d), which enter the cache.

    Args:
        bound: upper bound on the numbers of visible rows; the work is split by it.
    """
    keys, values = cache.store.layer(0)
    slot, row = at.into.reshape(-1, 2).unbind(1)
    where = hybrid.HybridMetadata.build(keys, at.slots, at.lengths, bound, at.mask, at.begins)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for rows, x in ((keys, k), (values, v)):
            rows[slot, :, row] = x.transpose(0, 1)
        queries = q.unflatten(1, (len(at.slots), -1)).transpose(0, 1)
        out = hybrid.attend_prefix_and_tree(queries, keys, values, where, keys.shape[3] ** -0.5)
        return out.transpose(0, 1).flatten(1, 2)

    return attend
