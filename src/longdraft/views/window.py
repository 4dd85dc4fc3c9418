"""A window's KV cache: the last keys and values of each text, and the tree's behind them.

The K/V of a LongSpec block depend on token and position alone, so the window is all a draft has to remember: its memory
is the same at any context length. Rows stand in the order of the text, so what is seen is one piece of them; where they
reach the end of their room, the window moves back to its beginning. Behind the newest row lies the tree of one round,
which the next round overwrites; only emitted tokens enter the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from longdraft.attention import hybrid
from longdraft.attention.transfer import on_device
from longdraft.kv.store import KVShape

# Rows beside the window: it moves once in so many tokens.
SPARE = 256


class Window:
    """Windows and scratch space, one of each a slot.

    Args:
        shape: of the draft's keys: KV heads, head size, dtype (layers are not looked at).
        slots: how many sequences fit.
        window: keys that a query sees, its own included.
        scratch: tree nodes of one round whose K/V are kept.

    Attributes:
        keys, values: (slots, kv_heads, window + SPARE + scratch, head_dim).
        together: all sequences are attended to in one call, by :meth:`write` and :meth:`attend`; else one by one.
    """

    def __init__(self, shape: KVShape, slots: int, window: int, scratch: int, device: torch.device | str) -> None:
        self.window = window
        size = (slots, shape.kv_heads, window + SPARE + scratch, shape.head_dim)
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

    def write(
        self,
        slots: Sequence[int],
        places: Sequence[tuple[int, int]],
        counts: Sequence[int],
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Puts new rows where there is room for them, those of all slots at once.

        Args:
            places: the rows [begin, end) of each slot that are seen, the new ones last.
            counts: of new rows.
            k, v: (Hkv, sum of counts, d).
        """
        new = [
            (slot, row)
            for slot, (_, end), count in zip(slots, places, counts, strict=True)
            for row in range(end - count, end)
        ]
        slot, row = on_device(new, self.keys.device).unbind(1)
        for rows, x in ((self.keys, k), (self.values, v)):
            rows[slot, :, row] = x.transpose(0, 1)

    def attend(
        self, slots: Sequence[int], places: Sequence[tuple[int, int]], q: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of as many rows of each slot, all slots at once, over the rows that each has.

        Args:
            places: the rows [begin, end) of each slot that are seen.
            q: (B, Hq, T, d).
            mask: (B, T, S) bool, which of the last S of these rows a query sees; None: all.

        Returns:
            (B, Hq, T, d).
        """
        if mask is None:
            mask = torch.zeros(q.shape[0], q.shape[2], 0, dtype=torch.bool, device=q.device)
        lengths = [end - begin - mask.shape[2] for begin, end in places]
        numbers = [slots, [begin for begin, _ in places], lengths]
        slots_t, begins, lengths_t = on_device(numbers, q.device, torch.int32).unbind(0)
        where = hybrid.Places.of(self.keys, slots_t, lengths_t, max(lengths), on_device(mask, q.device), begins)
        return hybrid.attend_at(q, self.keys, self.values, where, self._scale)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """q (Hq, T, d), k and v (Hkv, n, d), seen (T, n) -> (Hq, T, d); K/V are read once per KV head."""
        rows = q.reshape(k.shape[0], -1, q.shape[-1])  # the heads of a group are folded into rows
        mask = None if seen is None else seen.repeat(q.shape[0] // k.shape[0], 1)
        out = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=mask, scale=self._scale)
        return out.reshape(q.shape)
