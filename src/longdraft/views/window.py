"""A window's KV cache: the last keys and values of each text, and the tree's behind them.

The K/V of a LongSpec block depend on token and position alone, so the window is all a draft has to remember: its memory
is the same at any context length. Rows stand in the order of the text, so what is seen is one piece of them; where they
reach the end of their room, the window moves back to its beginning. Behind the newest row lies the tree of one round,
which the next round overwrites; only emitted tokens enter the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from longdraft.attention import hybrid
from longdraft.attention.transfer import on_device
from longdraft.memory.store import KVShape

# Rows beside the window: it moves once in so many tokens.
SPARE = 256


class Placed(NamedTuple):
    """Where new rows of a batch enter their windows, and what is seen there: all of it on the device.

    Attributes:
        into: (B, rows, 2), or (N, 2) where sequences have several numbers of new rows: slot and row of each.
        slots, begins, lengths: (B,) int32: what comes before the rows of the mask is seen whole, rows [begin, begin +
            length) of each slot.
        mask: (B, T, S) bool, which of the S rows behind these each of the T that go on sees; S = 0: there are none.
    """

    into: torch.Tensor
    slots: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor


class Window:
    """Windows and scratch space, one of each a slot.

    Args:
        shape: of the draft's keys: KV heads, head size, dtype (layers are not looked at).
        slots: how many sequences fit.
        window: keys that a query sees, its own included.
        scratch: tree nodes of one round whose K/V are kept.

    Attributes:
        keys, values: (slots, kv_heads, window + SPARE + scratch + 1, head_dim). The last row is nobody's: rows that pad
            a batch are written there.
        together: all sequences are attended to in one call, by :meth:`attending`; else one by one.
    """

    def __init__(self, shape: KVShape, slots: int, window: int, scratch: int, device: torch.device | str) -> None:
        self.window, self.scratch = window, scratch
        size = (slots, shape.kv_heads, window + SPARE + scratch + 1, shape.head_dim)
        # Zeros: a masked row that was never written must not hold a NaN, which a weight of zero would not silence.
        self.keys = torch.zeros(size, dtype=shape.dtype, device=device)
        self.values = torch.zeros(size, dtype=shape.dtype, device=device)
        self.together = hybrid.unavailable(self.keys.device, shape.dtype, shape.head_dim) is None
        self._scale = shape.head_dim**-0.5
        self._ends = [0] * slots
        self._firsts = [0] * slots  # the position whose row is row 0

    def end(self, slot: int) -> int:
        """The position behind the newest token of a slot's window."""
        return self._ends[slot]

    def forget(self, slot: int, end: int) -> None:
        """Takes tokens from position ``end`` on for unknown: they are appended again before anyone looks.

        Where the text has become shorter, old tokens may be gone, and the window must be filled anew.
        """
        self._ends[slot] = min(self._ends[slot], end)
        if end == 0:
            self._firsts[slot] = 0

    def wrapped(self, slot: int) -> bool:
        """Whether tokens of the text's beginning are gone."""
        return self._firsts[slot] > 0

    def append(self, slot: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Puts tokens at positions [start, start + n) behind those before them.

        Args:
            k, v: (Hkv, n, d), n at most ``window``.
        """
        begin = self.make_room(slot, start, k.shape[1])
        for rows, new in ((self.keys[slot], k), (self.values[slot], v)):
            rows[:, begin : begin + k.shape[1]] = new

    def make_room(self, slot: int, start: int, n: int) -> int:
        """The row from which on the keys and values of positions [start, start + n) are to be written, at once."""
        first = self._firsts[slot]
        if not first <= start <= self._ends[slot]:  # what lies there is not what stands before these
            first = start
        if start + n - first > self.window + SPARE:
            kept = self.window - n
            old = start - kept - first
            for rows in (self.keys[slot], self.values[slot]):
                rows[:, :kept] = rows[:, old : old + kept].clone()
            first = start - kept
        self._firsts[slot], self._ends[slot] = first, start + n
        return start - first

    def seen(self, slot: int, depth: int = 0, nodes: int = 0) -> tuple[int, int]:
        """The rows [begin, end) that are seen.

        Args:
            depth: of the nodes that look: they are so far behind the newest token, and no longer see the oldest keys.
            nodes: of the tree, whose rows are the last ones.
        """
        first, end = self._firsts[slot], self._ends[slot]
        return max(0, end - self.window + depth - first), end - first + nodes

    def attend_newest(self, slot: int, q: torch.Tensor) -> torch.Tensor:
        """The newest token's query (Hq, 1, d) sees the whole window -> (Hq, 1, d)."""
        begin, end = self.seen(slot)
        return self._attend(q, self.keys[slot, :, begin:end], self.values[slot, :, begin:end], None)

    def attend_level(
        self,
        slot: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ancestors: torch.Tensor,
        depth: int,
    ) -> torch.Tensor:
        """Attention of the tree nodes of one depth, whose K/V become scratch.

        Args:
            q: (Hq, W, d); k, v: (Hkv, W, d) of the same nodes.
            ancestors: (W, S) bool, S scratch nodes with these W the last: which of them a node sees, itself included.
            depth: of these nodes, 1 or more.
        """
        begin, end = self.seen(slot, depth, ancestors.shape[1])
        for rows, new in ((self.keys[slot], k), (self.values[slot], v)):
            rows[:, end - new.shape[1] : end] = new
        text = ancestors.new_ones(()).expand(q.shape[1], end - begin - ancestors.shape[1])
        seen = torch.cat([text, ancestors], dim=1)
        return self._attend(q, self.keys[slot, :, begin:end], self.values[slot, :, begin:end], seen)

    def placed(
        self,
        slots: Sequence[int],
        places: Sequence[tuple[int, int]],
        counts: Sequence[int],
        mask: torch.Tensor | None,
        rows: int | None = None,
    ) -> Placed:
        """Where the new rows of some slots go, in one copy to the device.

        Args:
            places: the rows [begin, end) of each slot that are seen, the new ones last.
            counts: of new rows.
            mask: (B, T, S) bool, which of the last S of these rows a query sees; None: all.
            rows: pad the new rows to so many a slot, and the mask to all of the scratch space.
        """
        device = self.keys.device
        if mask is None:
            mask = torch.zeros(len(slots), 1, 0, dtype=torch.bool, device=device)
        into, nobody = [], self.keys.shape[2] - 1
        for slot, (_, end), count in zip(slots, places, counts, strict=True):
            into += [(slot, row) for row in range(end - count, end)] + [(slot, nobody)] * ((rows or count) - count)
        begins = [begin for begin, _ in places]
        seen = zip(slots, begins, (end - begin - mask.shape[2] for begin, end in places), strict=True)
        numbers = on_device([*(n for pair in into for n in pair), *(n for one in seen for n in one)], device)
        found = numbers[: 2 * len(into)].view(-1, 2)
        slots_t, begins_t, lengths_t = numbers[2 * len(into) :].to(torch.int32).view(-1, 3).unbind(1)
        mask = on_device(mask, device)
        if rows is not None:
            found, mask = found.view(len(slots), rows, 2), F.pad(mask, (0, self.scratch - mask.shape[2]))
        return Placed(found, slots_t.contiguous(), begins_t.contiguous(), lengths_t.contiguous(), mask)

    def attending(self, at: Placed) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """What attends for all slots at once, from numbers on the device alone, so that it can be recorded.

        Returns:
            Takes q (Hq, B * T, d) and new k, v (Hkv, N, d), which enter the windows; gives (Hq, B * T, d).
        """
        slot, row = at.into.reshape(-1, 2).unbind(1)
        where = hybrid.Places.of(self.keys, at.slots, at.lengths, self.keys.shape[2], at.mask, at.begins)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for rows, x in ((self.keys, k), (self.values, v)):
                rows[slot, :, row] = x.transpose(0, 1)
            queries = q.unflatten(1, (len(at.slots), -1)).transpose(0, 1)
            out = hybrid.attend_at(queries, self.keys, self.values, where, self._scale)
            return out.transpose(0, 1).flatten(1, 2)

        return attend

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """q (Hq, T, d), k and v (Hkv, n, d), seen (T, n) -> (Hq, T, d); K/V are read once per KV head."""
        rows = q.reshape(k.shape[0], -1, q.shape[-1])  # the heads of a group are folded into rows
        mask = None if seen is None else seen.repeat(q.shape[0] // k.shape[0], 1)
        out = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=mask, scale=self._scale)
        return out.reshape(q.shape)
