"""A ring KV cache: the last keys and values of each text, and the tree's behind them.

The K/V of a LongSpec block depend on token and position alone, so the ring is all a draft has to remember: its
memory is the same at any context length. The token at position p stands in row p % window. Behind the ring lies
scratch space for the nodes of one round's tree; a new round overwrites it, and only emitted tokens enter the ring.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longdraft.kv.store import KVShape


class Ring:
    """Rings and scratch space, one of each a slot.

    Args:
        shape: of the draft's keys: KV heads, head size, dtype (layers are not looked at).
        slots: how many sequences fit.
        window: keys that a query sees, its own included.
        scratch: tree nodes of one round whose K/V are kept.

    Attributes:
        keys, values: (slots, kv_heads, window + scratch, head_dim); rows [0, window) are the ring.
    """

    def __init__(self, shape: KVShape, slots: int, window: int, scratch: int, device: torch.device | str) -> None:
        self.window = window
        size = (slots, shape.kv_heads, window + scratch, shape.head_dim)
        # Zeros: a masked row that was never written must not hold a NaN, which a weight of zero would not silence.
        self.keys = torch.zeros(size, dtype=shape.dtype, device=device)
        self.values = torch.zeros(size, dtype=shape.dtype, device=device)
        self._rows = torch.arange(window, device=device)
        self._scale = shape.head_dim**-0.5
        self._ends = [0] * slots
        self._reached = [0] * slots

    def end(self, slot: int) -> int:
        """The position behind the newest token of a slot's ring."""
        return self._ends[slot]

    def forget(self, slot: int, end: int) -> None:
        """Takes tokens from position ``end`` on for unknown: they are appended again before anyone looks.

        Where the text has become shorter, a full ring lacks old tokens, and must be filled anew.
        """
        self._ends[slot] = min(self._ends[slot], end)
        if end == 0:
            self._reached[slot] = 0

    def wrapped(self, slot: int) -> bool:
        """Whether the ring has ever overwritten a token."""
        return self._reached[slot] > self.window

    def append(self, slot: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Puts tokens at positions [start, start + n) into the ring, over the oldest ones.

        Args:
            k, v: (Hkv, n, d), n at most ``window``.
        """
        n, first = k.shape[1], start % self.window
        before = min(n, self.window - first)  # rows up to the ring's end; the rest goes on at its beginning
        for ring, new in ((self.keys[slot], k), (self.values[slot], v)):
            ring[:, first : first + before] = new[:, :before]
            ring[:, : n - before] = new[:, before:]
        self._ends[slot] = start + n
        self._reached[slot] = max(self._reached[slot], start + n)

    def attend_newest(self, slot: int, q: torch.Tensor) -> torch.Tensor:
        """The newest token's query (Hq, 1, d) sees the whole ring -> (Hq, 1, d)."""
        n = min(self._ends[slot], self.window)
        return self._attend(q, self.keys[slot, :, :n], self.values[slot, :, :n], None)

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

        A node at depth d is d positions behind the ring's newest token, so it no longer sees the d oldest keys.

        Args:
            q: (Hq, W, d); k, v: (Hkv, W, d) of the same nodes.
            ancestors: (W, S) bool, S scratch nodes with these W the last: which of them a node sees, itself included.
            depth: of these nodes, 1 or more.
        """
        end = self.window + ancestors.shape[1]
        for scratch, new in ((self.keys[slot], k), (self.values[slot], v)):
            scratch[:, end - new.shape[1] : end] = new
        newest = self._ends[slot] - 1
        age = (newest - self._rows) % self.window  # of the token in each row, 0 for the newest
        ring = age < min(self.window - depth, newest + 1)
        seen = torch.cat([ring.expand(q.shape[1], -1), ancestors], dim=1)
        return self._attend(q, self.keys[slot, :, :end], self.values[slot, :, :end], seen)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """q (Hq, T, d), k and v (Hkv, n, d), seen (T, n) -> (Hq, T, d); K/V are read once per KV head."""
        rows = q.reshape(k.shape[0], -1, q.shape[-1])  # the heads of a group are folded into rows
        mask = None if seen is None else seen.repeat(q.shape[0] // k.shape[0], 1)
        out = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=mask, scale=self._scale)
        return out.reshape(q.shape)
