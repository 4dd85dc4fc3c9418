"""A window's KV cache: the last keys and values of each text, and those of a tree behind them.

The K/V of a LongSpec block depend on token and position alone, so a draft only has to remember the window: its memory
is the same at any context length. Rows are in the order of the text, so the visible ones are contiguous; when they
reach the end of the buffer, the window is moved back to its beginning. Behind the newest row lies the tree of one
round, which the next round overwrites; only emitted tokens enter the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from longdraft.attention import hybrid
from longdraft.attention.sdpa import one_text
from longdraft.attention.transfer import on_device
from longdraft.memory.rooms import Room, Rooms
from longdraft.memory.store import KVShape
from longdraft.native.boundary import WHOLE

# Rows beside the window: it is moved once in this many tokens.
SPARE = 256


class Placed(NamedTuple):
    """Places of a batch's new rows in their windows, and the rows that they see; all tensors are on the device.

    Attributes:
        into: slot and row of each new row: (B, rows, 2), or (N, 2) if sequences have different numbers of them.
        slots, begins, lengths: (B,) int32: rows [begin, begin + length) of each slot are seen by all its queries.
        mask: (B, T, S) bool, which of the S rows behind those each of the T queries sees; S may be 0.
    """

    into: torch.Tensor
    slots: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor


class Window:
    """Windows with scratch space behind them, one a slot.

    Args:
        shape: KV heads, head size and dtype of the draft's keys.
        slots: number of sequences.
        window: keys that a query sees, its own included.
        scratch: tree nodes of one round whose K/V are kept.
        rooms: memory to take, with as many slots and rows or more; None allocates memory of the window's own.

    Attributes:
        room: the memory that was taken; None for the window's own.
        keys, values: (slots, kv_heads, at least window + SPARE + scratch + 1, head_dim). The last row takes a batch's
            padding.
        together: whether all sequences attend in one call, by :meth:`attending`; else one by one.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        window: int,
        scratch: int,
        device: torch.device | str,
        rooms: Rooms | None = None,
    ) -> None:
        self.window, self.scratch = window, scratch

        def make(slots: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
            # Zeros: a masked row that was never written must not hold a NaN, which a weight of zero would not silence.
            size = slots, shape.kv_heads, rows, shape.head_dim
            keys, values = (torch.zeros(size, dtype=shape.dtype, device=device) for _ in "kv")
            return keys, values

        rows = window + SPARE + scratch + 1
        self.room: Room | None = None
        if rooms is None:
            self.keys, self.values = make(slots, rows)
        else:
            self.room = rooms.take(self, ("window", shape, torch.device(device)), slots, rows, make)
            self.keys, self.values = self.room.tensors
        self.together = hybrid.unavailable(self.keys.device, shape.dtype, shape.head_dim) is None
        self._scale = shape.head_dim**-0.5
        self._ends = [0] * slots
        self._firsts = [0] * slots  # positions in row 0

    def end(self, slot: int) -> int:
        """The position after the newest token of a slot's window."""
        return self._ends[slot]

    def forget(self, slot: int, end: int) -> None:
        """Forgets tokens from position ``end`` on, which are appended again before the next attention.

        If the text has become shorter, old tokens may be gone, and the window must be filled anew.
        """
        self._ends[slot] = min(self._ends[slot], end)
        if end == 0:
            self._firsts[slot] = 0

    def wrapped(self, slot: int) -> bool:
        """True if the text's first tokens are gone."""
        return self._firsts[slot] > 0

    def append(self, slot: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Appends tokens at positions [start, start + n).

        Args:
            k, v: (Hkv, n, d), n at most ``window``.
        """
        begin = self.make_room(slot, start, k.shape[1])
        for rows, new in ((self.keys[slot], k), (self.values[slot], v)):
            rows[:, begin : begin + k.shape[1]] = new

    def make_room(self, slot: int, start: int, n: int) -> int:
        """Returns the row from which on keys and values of positions [start, start + n) are to be written, at once."""
        first = self._firsts[slot]
        if not first <= start <= self._ends[slot]:  # the rows there do not precede these
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
        """Returns the rows [begin, end) that a query sees.

        Args:
            depth: of the querying nodes behind the newest token; deeper ones see fewer of the oldest keys.
            nodes: of the tree, whose rows are the last ones.
        """
        first, end = self._firsts[slot], self._ends[slot]
        return max(0, end - self.window + depth - first), end - first + nodes

    def attend_newest(self, slot: int, q: torch.Tensor) -> torch.Tensor:
        """Attends with the newest token's query (Hq, 1, d) to the whole window -> (Hq, 1, d)."""
        begin, end = self.seen(slot)
        return one_text(q, self.keys[slot, :, begin:end], self.values[slot, :, begin:end], None, self._scale)

    def attend_level(
        self,
        slot: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ancestors: torch.Tensor,
        depth: int,
    ) -> torch.Tensor:
        """Attends with the tree nodes of one depth, whose K/V are written to the scratch space.

        Args:
            q: (Hq, W, d); k, v: (Hkv, W, d) of the same nodes.
            ancestors: (W, S) bool, which of S scratch nodes (these W are the last) a node sees, itself included.
            depth: of these nodes, at least 1.
        """
        begin, end = self.seen(slot, depth, ancestors.shape[1])
        for rows, new in ((self.keys[slot], k), (self.values[slot], v)):
            rows[:, end - new.shape[1] : end] = new
        text = ancestors.new_ones(()).expand(q.shape[1], end - begin - ancestors.shape[1])
        seen = torch.cat([text, ancestors], dim=1)
        return one_text(q, self.keys[slot, :, begin:end], self.values[slot, :, begin:end], seen, self._scale)

    def placed(
        self,
        slots: Sequence[int],
        places: Sequence[tuple[int, int]],
        counts: Sequence[int],
        mask: torch.Tensor | None,
        rows: int | None = None,
        batch: int | None = None,
    ) -> Placed:
        """Computes the places of some slots' new rows, with one copy to the device.

        Args:
            places: the visible rows [begin, end) of each slot, the new ones last.
            counts: numbers of new rows.
            mask: (B, T, S) bool, which of the last S of these rows a query sees; None: all.
            rows: pad the new rows to so many a slot, and the mask to all of the scratch space.
            batch: pad the slots to so many. The others' new rows are padding, and they see one row, of the first slot.
        """
        device = self.keys.device
        if mask is None:
            mask = torch.empty(len(slots), 1, 0, dtype=torch.bool, device=device)
        into, padding = [], self.keys.shape[2] - 1
        for slot, (_, end), count in zip(slots, places, counts, strict=True):
            into += [(slot, row) for row in range(end - count, end)] + [(slot, padding)] * ((rows or count) - count)
        more = (batch or len(slots)) - len(slots)
        into += [(slots[0], padding)] * (rows or 1) * more
        begins = [begin for begin, _ in places]
        lengths = [end - begin - mask.shape[2] for begin, end in places]
        count = len(slots) + more
        # Each column begins at a multiple of 16 bytes, which kernels may rely on.
        column = -(-count // 4) * 4
        columns = ([*slots, *[slots[0]] * more], [*begins, *[0] * more], [*lengths, *[1] * more])
        seen = [n for each in columns for n in (*each, *[0] * (column - count))]
        # Integers of both widths travel together.
        into_h = torch.tensor(into, **WHOLE).view(torch.int32).flatten()
        seen_h = torch.tensor(seen, dtype=torch.int32, device="cpu")
        numbers = on_device(torch.cat([into_h, seen_h]), device)
        into_t = numbers[: len(into_h)].view(torch.long).view(-1, 2)
        slots_t, begins_t, lengths_t = numbers[len(into_h) :].view(3, -1)[:, :count].unbind()
        mask = on_device(mask, device)
        if rows is not None:
            into_t = into_t.view(-1, rows, 2)
            mask = F.pad(mask, (0, self.scratch - mask.shape[2], 0, 0, 0, more))
        return Placed(into_t, slots_t, begins_t, lengths_t, mask)

    def attending(
        self, at: Placed, bound: int | None = None
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns a function that attends for all slots at once; its numbers are on the device, so it can be recorded.

        It takes q (Hq, B * T, d) and new k, v (Hkv, N, d), which enter the windows, and returns (Hq, B * T, d).

        Args:
            bound: upper bound on the numbers of visible rows; the work is split by it. None for the largest.
        """
        slot, row = at.into.reshape(-1, 2).unbind(1)
        where = hybrid.Places.of(self.keys, at.slots, at.lengths, bound or self.keys.shape[2], at.mask, at.begins)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for rows, x in ((self.keys, k), (self.values, v)):
                rows[slot, :, row] = x.transpose(0, 1)
            queries = q.unflatten(1, (len(at.slots), -1)).transpose(0, 1)
            out = hybrid.attend_at(queries, self.keys, self.values, where, self._scale)
            return out.transpose(0, 1).flatten(1, 2)

        return attend
