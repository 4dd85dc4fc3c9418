"""Rows of windowed layers: the last rows of each text, and the unverified ones behind them.

A layer with a sliding window, or with attention inside chunks of the text, sees a bounded number of rows. Their keys
and values lie one behind the other in a buffer that begins at text row ``starts[slot]``. When the buffer is full, the
rows that can still be seen are moved to its front, so its size does not depend on the length of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.transfer import to_device
from longdraft.native.boundary import CPU_INT64

# A buffer begins at a multiple of this text row. Our kernels sum keys in segments of so many rows, and segments have to
# hold the same rows whenever a row is computed, or its last bits would differ.
SEGMENT = 512
# Rows before the window that are kept, so that a text can be taken back a little.
BACK = 512
# Rows that are written at once: a piece of a prompt, or a tree behind the rows that wait for a full verification.
PIECE = 1024


@dataclass(frozen=True)
class AttentionSpan:
    """The rows that a layer sees.

    Attributes:
        size: a row sees the last ``size`` rows, its own included; or the rows of its chunk of ``size`` rows.
        chunked: the text is cut into chunks, and a row sees the rows of its own chunk only (Llama 4).
    """

    size: int
    is_chunked: bool = False

    def first_visible(self, position: int) -> int:
        """The first text row that text row ``position`` sees."""
        return position // self.size * self.size if self.is_chunked else max(0, position - self.size + 1)

    def first_visible_t(self, positions: torch.Tensor) -> torch.Tensor:
        """The same for a tensor of rows."""
        return positions // self.size * self.size if self.is_chunked else (positions - self.size + 1).clamp_min(0)


@dataclass(frozen=True)
class WindowShape:
    """Layers of one span: how many, and the sizes of their keys and values."""

    span: AttentionSpan
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class WindowKVCache:
    """The rows of all layers of one span. The methods do what those of
    :class:`~longdraft.memory.recurrent.RecurrentStates` say.

    Args:
        shape: the layers.
        slots, capacity: of the store that these belong to.
        transposed_keys: keep the keys of a head as a (head_dim, rows) matrix in memory.

    Attributes:
        keys, values: (layers, slots, kv_heads, rows, head_dim).
        start_positions: the text row that row 0 of each slot's buffer holds.
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
        self.buffer_len = min(capacity, self.buffer_len_for(shape.span))
        self.device = torch.device(device)
        size = (shape.layers, slots, shape.kv_heads, self.buffer_len, shape.head_dim)
        # Zeros: narrower heads leave columns unwritten, and a hidden row must not hold a NaN.
        self.values = torch.zeros(size, dtype=shape.dtype, device=device)
        turned = torch.zeros((*size[:3], size[4], size[3]), dtype=shape.dtype, device=device).transpose(-1, -2)
        self.keys = turned if transposed_keys else torch.zeros_like(self.values)
        self.start_positions = [0] * slots
        self._ends = [0] * slots

    @property
    def bytes_per_slot(self) -> int:
        return (self.keys.numel() + self.values.numel()) * self.keys.itemsize // max(1, self.keys.shape[1])

    @staticmethod
    def buffer_len_for(span: AttentionSpan) -> int:
        """Rows of a buffer that serves texts of any length."""
        return span.size + BACK + SEGMENT + PIECE + SEGMENT

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, (slots, kv_heads, rows, head_dim), as views."""
        return self.keys[index], self.values[index]

    def batch_in_buffer(self, batch: ForwardBatch) -> ForwardBatch:
        """The block as these layers see it: laid on the buffer, with the first rank that each row sees."""
        key = (WindowKVCache, id(self))
        if key not in batch.metadata:
            starts = [self.start_positions[slot] for slot in batch.slots]
            prefix_lens = [base - start for base, start in zip(batch.root_positions, starts, strict=True)]
            device = batch.slots_t.device
            prefix_lens_t, starts_t = (to_device(x, device, torch.int32) for x in (prefix_lens, starts))
            rows = (prefix_lens_t + starts_t).unsqueeze(1) + batch.depths(device)
            window_starts = (self.shape.span.first_visible_t(rows) - starts_t.unsqueeze(1)).clamp_min(0).int()
            batch.metadata[key] = replace(
                batch,
                prefix_lens=tuple(prefix_lens),
                root_positions=tuple(prefix_lens),
                prefix_lens_t=prefix_lens_t,
                window_starts=window_starts,
            )
        placed: ForwardBatch = batch.metadata[key]
        return placed

    def prepare(self, slots: Sequence[int], root_positions: Sequence[int], num_tokens: int) -> None:
        """Makes room before a forward.

        Args:
            root_positions: for each slot the text row that its unverified rows begin at.
            num_tokens: unverified rows behind it, those of earlier forwards over the same tree included.

        Raises:
            ValueError: the rows do not fit behind a window.
        """
        for slot, base in zip(slots, root_positions, strict=True):
            self._ends[slot] = max(self._ends[slot], base)
            if base + num_tokens - self.start_positions[slot] <= self.buffer_len:
                continue
            start = self.shape.span.first_visible(max(0, base - BACK)) // SEGMENT * SEGMENT
            if base + num_tokens - start > self.buffer_len:
                raise ValueError(
                    f"{num_tokens} rows behind a window of {self.shape.span.size} exceed {self.buffer_len} rows"
                )
            old = start - self.start_positions[slot]
            for tensor in (self.keys, self.values):
                own = tensor[:, slot]
                own[:, :, : self.buffer_len - old] = own[:, :, old:].clone()
            self.start_positions[slot] = start

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor, batch: ForwardBatch) -> None:
        """Writes a block's rows of one layer, (B, heads, T, head_dim), uncommitted."""
        own_keys, own_values = self.layer(index)
        for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
            rows = slice(n + batch.tree_offset, n + batch.tree_len)
            own_keys[slot, : keys.shape[1], rows, : keys.shape[3]] = keys[b]
            own_values[slot, : values.shape[1], rows, : values.shape[3]] = values[b]

    def commit(self, slot: int, base_len: int, path: Sequence[int]) -> None:
        first = base_len - self.start_positions[slot]
        moved = next((i for i, row in enumerate(path) if row != i), len(path))
        if moved < len(path):
            source = to_device([first + row for row in path[moved:]], self.device)
            for tensor in (self.keys, self.values):
                own = tensor[:, slot]
                own[:, :, first + moved : first + len(path)] = own.index_select(2, source)
        self._ends[slot] = base_len + len(path)

    def restorable_length(self, slot: int, length: int) -> int:
        length = min(length, self._ends[slot])
        # The next row sees rows from here on.
        return length if self.shape.span.first_visible(length) >= self.start_positions[slot] else 0

    def truncate(self, slot: int, length: int) -> None:
        if length and self.restorable_length(slot, length) != length:
            raise ValueError(
                f"slot {slot} has lost the rows before row {self.start_positions[slot]}: it cannot go to {length}"
            )
        if not length:
            self.start_positions[slot] = 0
        self._ends[slot] = length

    def copy_from(self, other: WindowKVCache, source_slot: int, slot: int, length: int) -> None:
        start = other.start_positions[source_slot]
        for own, rows in ((self.keys, other.keys), (self.values, other.values)):
            own[:, slot, :, : length - start] = rows[:, source_slot, :, : length - start]
        self.start_positions[slot], self._ends[slot] = start, length

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        start = self.start_positions[slot]
        rows = slice(0, self._ends[slot] - start)
        keys, values = (x[:, slot, :, rows].contiguous() for x in (self.keys, self.values))
        return {"keys": keys.cpu(), "values": values.cpu(), "start": torch.tensor(start, **CPU_INT64)}

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        if set(tensors) != {"keys", "values", "start"}:
            raise ValueError(f"it has {', '.join(sorted(tensors)) or 'nothing'} in the place of windowed layers' rows")
        start = int(tensors["start"])
        held = length - start
        for own, rows in ((self.keys, tensors["keys"]), (self.values, tensors["values"])):
            if not 0 <= held <= self.buffer_len or rows.shape != own[:, slot, :, :held].shape:
                raise ValueError(f"rows of windowed layers {tuple(rows.shape)} do not fit {tuple(own[:, slot].shape)}")
            own[:, slot, :, :held] = rows.to(own.device)
        self.start_positions[slot], self._ends[slot] = start, length
