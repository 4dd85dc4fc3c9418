"""Rows of windowed layers: the last rows of each text, and the unverified ones behind them.

A layer with a sliding window, or with attention inside chunks of the text, sees a bounded number of rows. Their keys
and values lie one behind the other in a buffer that begins at text row ``starts[slot]``. When the buffer is full, the
rows that can still be seen are moved to its front, so its size does not depend on the length of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from longdraft.attention.block import Block
from longdraft.attention.transfer import on_device
from longdraft.native.boundary import WHOLE

# A buffer begins at a multiple of this text row. Our kernels sum keys in segments of so many rows, and segments have to
# hold the same rows whenever a row is computed, or its last bits would differ.
SEGMENT = 512
# Rows before the window that are kept, so that a text can be taken back a little.
BACK = 512
# Rows that are written at once: a piece of a prompt, or a tree behind the rows that wait for a full verification.
PIECE = 1024


@dataclass(frozen=True)
class Span:
    """The rows that a layer sees.

    Attributes:
        size: a row sees the last ``size`` rows, its own included; or the rows of its chunk of ``size`` rows.
        chunked: the text is cut into chunks, and a row sees the rows of its own chunk only (Llama 4).
    """

    size: int
    chunked: bool = False

    def first(self, row: int) -> int:
        """The first text row that text row ``row`` sees."""
        return row // self.size * self.size if self.chunked else max(0, row - self.size + 1)

    def firsts(self, rows: torch.Tensor) -> torch.Tensor:
        """The same for a tensor of rows."""
        return rows // self.size * self.size if self.chunked else (rows - self.size + 1).clamp_min(0)


@dataclass(frozen=True)
class WindowShape:
    """Layers of one span: how many, and the sizes of their keys and values."""

    span: Span
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class WindowStates:
    """The rows of all layers of one span. The methods do what those of
    :class:`~longdraft.memory.recurrent.RecurrentStates` say.

    Args:
        shape: the layers.
        slots, capacity: of the store that these belong to.
        transposed_keys: keep the keys of a head as a (head_dim, rows) matrix in memory.

    Attributes:
        keys, values: (layers, slots, kv_heads, rows, head_dim).
        starts: the text row that row 0 of each slot's buffer holds.
    """

    def __init__(
        self,
        shape: WindowShape,
        slots: int,
        capacity: int,
        device: torch.device | str = "cpu",
        transposed_keys: bool = False,
    ) -> None:
        self.shape = shape
        self.rows = min(capacity, self.rows_for(shape.span))
        self.device = torch.device(device)
        size = (shape.layers, slots, shape.kv_heads, self.rows, shape.head_dim)
        # Zeros: narrower heads leave columns unwritten, and a hidden row must not hold a NaN.
        self.values = torch.zeros(size, dtype=shape.dtype, device=device)
        turned = torch.zeros((*size[:3], size[4], size[3]), dtype=shape.dtype, device=device).transpose(-1, -2)
        self.keys = turned if transposed_keys else torch.zeros_like(self.values)
        self.starts = [0] * slots
        self._ends = [0] * slots

    @property
    def bytes_per_slot(self) -> int:
        return (self.keys.numel() + self.values.numel()) * self.keys.itemsize // max(1, self.keys.shape[1])

    @staticmethod
    def rows_for(span: Span) -> int:
        """Rows of a buffer that serves texts of any length."""
        return span.size + BACK + SEGMENT + PIECE + SEGMENT

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, (slots, kv_heads, rows, head_dim), as views."""
        return self.keys[index], self.values[index]

    def placed(self, block: Block) -> Block:
        """The block as these layers see it: laid on the buffer, with the first rank that each row sees."""
        key = (WindowStates, id(self))
        if key not in block.derived:
            starts = [self.starts[slot] for slot in block.slots]
            lengths = [base - start for base, start in zip(block.bases, starts, strict=True)]
            device = block.slots_t.device
            lengths_t, starts_t = (on_device(x, device, torch.int32) for x in (lengths, starts))
            rows = (lengths_t + starts_t).unsqueeze(1) + block.depths(device)
            begins = (self.shape.span.firsts(rows) - starts_t.unsqueeze(1)).clamp_min(0).int()
            block.derived[key] = replace(
                block, lengths=tuple(lengths), bases=tuple(lengths), lengths_t=lengths_t, begins=begins
            )
        placed: Block = block.derived[key]
        return placed

    def prepare(self, slots: Sequence[int], bases: Sequence[int], rows: int) -> None:
        """Makes room before a forward.

        Args:
            bases: for each slot the text row that its unverified rows begin at.
            rows: unverified rows behind it, those of earlier forwards over the same tree included.

        Raises:
            ValueError: the rows do not fit behind a window.
        """
        for slot, base in zip(slots, bases, strict=True):
            self._ends[slot] = max(self._ends[slot], base)
            if base + rows - self.starts[slot] <= self.rows:
                continue
            start = self.shape.span.first(max(0, base - BACK)) // SEGMENT * SEGMENT
            if base + rows - start > self.rows:
                raise ValueError(f"{rows} rows behind a window of {self.shape.span.size} exceed {self.rows} rows")
            old = start - self.starts[slot]
            for tensor in (self.keys, self.values):
                own = tensor[:, slot]
                own[:, :, : self.rows - old] = own[:, :, old:].clone()
            self.starts[slot] = start

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor, placed: Block) -> None:
        """Writes a block's rows of one layer, (B, heads, T, head_dim), uncommitted."""
        own_keys, own_values = self.layer(index)
        for b, (slot, n) in enumerate(zip(placed.slots, placed.lengths, strict=True)):
            rows = slice(n + placed.offset, n + placed.width)
            own_keys[slot, : keys.shape[1], rows, : keys.shape[3]] = keys[b]
            own_values[slot, : values.shape[1], rows, : values.shape[3]] = values[b]

    def commit(self, slot: int, start: int, path: Sequence[int]) -> None:
        first = start - self.starts[slot]
        moved = next((i for i, row in enumerate(path) if row != i), len(path))
        if moved < len(path):
            source = on_device([first + row for row in path[moved:]], self.device)
            for tensor in (self.keys, self.values):
                own = tensor[:, slot]
                own[:, :, first + moved : first + len(path)] = own.index_select(2, source)
        self._ends[slot] = start + len(path)

    def restorable(self, slot: int, length: int) -> int:
        length = min(length, self._ends[slot])
        # The next row sees rows from here on.
        return length if self.shape.span.first(length) >= self.starts[slot] else 0

    def truncate(self, slot: int, length: int) -> None:
        if length and self.restorable(slot, length) != length:
            raise ValueError(f"slot {slot} has lost the rows before row {self.starts[slot]}: it cannot go to {length}")
        if not length:
            self.starts[slot] = 0
        self._ends[slot] = length

    def copy(self, other: WindowStates, source: int, slot: int, length: int) -> None:
        start = other.starts[source]
        for own, rows in ((self.keys, other.keys), (self.values, other.values)):
            own[:, slot, :, : length - start] = rows[:, source, :, : length - start]
        self.starts[slot], self._ends[slot] = start, length

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        start = self.starts[slot]
        rows = slice(0, self._ends[slot] - start)
        keys, values = (x[:, slot, :, rows].contiguous() for x in (self.keys, self.values))
        return {"keys": keys.cpu(), "values": values.cpu(), "start": torch.tensor(start, **WHOLE)}

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        if set(tensors) != {"keys", "values", "start"}:
            raise ValueError(f"it has {', '.join(sorted(tensors)) or 'nothing'} in the place of windowed layers' rows")
        start = int(tensors["start"])
        held = length - start
        for own, rows in ((self.keys, tensors["keys"]), (self.values, tensors["values"])):
            if not 0 <= held <= self.rows or rows.shape != own[:, slot, :, :held].shape:
                raise ValueError(f"rows of windowed layers {tuple(rows.shape)} do not fit {tuple(own[:, slot].shape)}")
            own[:, slot, :, :held] = rows.to(own.device)
        self.starts[slot], self._ends[slot] = start, length
