"""KV caches of layers with a sliding window or chunked attention keep only the last entries of each sequence.

Such a layer attends to a bounded number of KV entries. The entries of a slot are in a buffer that begins at position
``start_positions[slot]`` of the sequence, uncommitted entries last. When the buffer is full, the entries that are still
visible move to the buffer's front, so the buffer's size does not depend on the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.transfer import to_device
from longdraft.memory.path_move import move_path
from longdraft.native.boundary import CPU_INT64

# Buffers begin at multiples of this position. Our kernels sum over segments of this many keys, and the last bits of a
# sum depend on the keys in the segment.
SEGMENT = 512
# Number of entries kept before the window, so that a sequence can be truncated by so many tokens.
TRUNCATION_MARGIN = 512
# Maximum number of entries written at once: a prompt chunk, or SpecPV's buffered tokens and a tree.
MAX_NEW_TOKENS = 1024


@dataclass(frozen=True)
class AttentionSpan:
    """The positions that a layer attends to: a sliding window, or a chunk of the sequence.

    Attributes:
        size: number of tokens of the window, including the query, or number of tokens of a chunk.
        is_chunked: True if the sequence is cut into chunks, and a token attends only within a chunk (Llama 4).
    """

    size: int
    is_chunked: bool = False

    def first_visible(self, position: int) -> int:
        """Returns the first position that the token at ``position`` attends to."""
        return position // self.size * self.size if self.is_chunked else max(0, position - self.size + 1)

    def first_visible_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns :meth:`first_visible` of each position in a tensor."""
        return positions // self.size * self.size if self.is_chunked else (positions - self.size + 1).clamp_min(0)


@dataclass(frozen=True)
class WindowShape:
    """The number of layers with one attention span, and the shape and dtype of a layer's keys and values."""

    span: AttentionSpan
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class WindowKVCache:
    """KV of all layers with one attention span, for a KV store with ``slots`` slots of ``capacity`` tokens. Methods
    without a docstring do the same as in :class:`~longdraft.memory.recurrent.RecurrentStates`.

    Args:
        shape: the layers.
        transposed_keys: True stores the keys of a head as a (head_dim, buffer_len) matrix.

    Attributes:
        keys: (layers, slots, kv_heads, buffer_len, head_dim).
        values: of the same shape as ``keys``.
        start_positions: the position of entry 0 of each slot's buffer.
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
        # Zeros, because narrower heads leave columns unwritten, and a masked entry must not contain a NaN.
        self.values = torch.zeros(size, dtype=shape.dtype, device=device)
        transposed = torch.zeros((*size[:3], size[4], size[3]), dtype=shape.dtype, device=device).transpose(-1, -2)
        self.keys = transposed if transposed_keys else torch.zeros_like(self.values)
        self.start_positions = [0] * slots
        self._end_positions = [0] * slots  # for each slot the position after the last entry

    @property
    def bytes_per_slot(self) -> int:
        return (self.keys.numel() + self.values.numel()) * self.keys.itemsize // max(1, self.keys.shape[1])

    @staticmethod
    def buffer_len_for(span: AttentionSpan) -> int:
        """Returns the number of entries of a buffer for sequences of any length."""
        rounding, spare = SEGMENT, SEGMENT  # the start is rounded down to a segment; entries move once in a segment
        return span.size + TRUNCATION_MARGIN + rounding + MAX_NEW_TOKENS + spare

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the keys and values of one layer, (slots, kv_heads, buffer_len, head_dim)."""
        return self.keys[index], self.values[index]

    def batch_in_buffer(self, batch: ForwardBatch) -> ForwardBatch:
        """Returns a batch for attention on the buffers: prefix lengths num_entries from the start of each buffer, and
        ``window_starts`` has the first visible entry of each token."""
        key = (WindowKVCache, id(self))
        if key not in batch.metadata:
            starts = [self.start_positions[slot] for slot in batch.slots]
            prefix_lens = [root - start for root, start in zip(batch.root_positions, starts, strict=True)]
            device = batch.slots_t.device
            prefix_lens_t, starts_t = (to_device(x, device, torch.int32) for x in (prefix_lens, starts))
            positions = (prefix_lens_t + starts_t).unsqueeze(1) + batch.depths(device)
            first_entries = self.shape.span.first_visible_positions(positions) - starts_t.unsqueeze(1)
            window_starts, lens = first_entries.clamp_min(0).int(), tuple(prefix_lens)
            # In the buffer, the position of the root is the prefix length.
            batch.metadata[key] = replace(
                batch, prefix_lens=lens, root_positions=lens, prefix_lens_t=prefix_lens_t, window_starts=window_starts,
                num_first=0,
            )  # fmt: skip
        in_buffer: ForwardBatch = batch.metadata[key]
        return in_buffer

    def prepare(self, slots: Sequence[int], root_positions: Sequence[int], num_tokens: int) -> None:
        """Makes space for ``num_tokens`` uncommitted tokens before a forward. The number includes tokens of the same
        tree from earlier forwards. ``root_positions`` has the position of each slot's first uncommitted token.

        Raises:
            ValueError: the buffer is too small for the tokens and the window before the tokens.
        """
        for slot, root in zip(slots, root_positions, strict=True):
            self._end_positions[slot] = max(self._end_positions[slot], root)
            if root + num_tokens - self.start_positions[slot] <= self.buffer_len:
                continue
            start = self.shape.span.first_visible(max(0, root - TRUNCATION_MARGIN)) // SEGMENT * SEGMENT
            if root + num_tokens - start > self.buffer_len:
                window = self.shape.span.size
                raise ValueError(f"{num_tokens} tokens and a window of {window} exceed a buffer of {self.buffer_len}")
            num_dropped = start - self.start_positions[slot]
            for tensor in (self.keys, self.values):
                entries = tensor[:, slot]
                entries[:, :, : self.buffer_len - num_dropped] = entries[:, :, num_dropped:].clone()
            self.start_positions[slot] = start

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor, batch: ForwardBatch) -> None:
        """Writes keys and values (sequences, heads, tokens, head_dim) of one layer, without committing them."""
        for buffer, kv in zip(self.layer(index), (keys, values), strict=True):
            for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
                new = slice(n + batch.tree_offset, n + batch.tree_len)
                buffer[slot, : kv.shape[1], new, : kv.shape[3]] = kv[b]

    def commit(self, slot: int, base_len: int, path: Sequence[int]) -> None:
        tensors = self.keys[:, slot], self.values[:, slot]
        move_path(base_len - self.start_positions[slot], path, lambda first: tensors)
        self._end_positions[slot] = base_len + len(path)

    def restorable_length(self, slot: int, length: int) -> int:
        length = min(length, self._end_positions[slot])
        next_token_start = self.shape.span.first_visible(length)
        return length if next_token_start >= self.start_positions[slot] else 0

    def truncate(self, slot: int, length: int) -> None:
        if length and self.restorable_length(slot, length) != length:
            start = self.start_positions[slot]
            raise ValueError(f"slot {slot} has no entries before {start}, so it cannot be truncated to {length}")
        if not length:
            self.start_positions[slot] = 0
        self._end_positions[slot] = length

    def copy_from(self, other: WindowKVCache, source_slot: int, slot: int, length: int) -> None:
        start = other.start_positions[source_slot]
        for target, source in ((self.keys, other.keys), (self.values, other.values)):
            target[:, slot, :, : length - start] = source[:, source_slot, :, : length - start]
        self.start_positions[slot], self._end_positions[slot] = start, length

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        start = self.start_positions[slot]
        entries = slice(0, self._end_positions[slot] - start)
        keys, values = (x[:, slot, :, entries].contiguous() for x in (self.keys, self.values))
        return {"keys": keys.cpu(), "values": values.cpu(), "start": torch.tensor(start, **CPU_INT64)}

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        if set(tensors) != {"keys", "values", "start"}:
            raise ValueError(f"it has {', '.join(sorted(tensors)) or 'nothing'} in place of the windowed layers' KV")
        start = int(tensors["start"])
        num_entries = length - start
        for buffer, new in ((self.keys, tensors["keys"]), (self.values, tensors["values"])):
            if not 0 <= num_entries <= self.buffer_len or new.shape != buffer[:, slot, :, :num_entries].shape:
                raise ValueError(f"windowed layers' KV {tuple(new.shape)} does not fit {tuple(buffer[:, slot].shape)}")
            buffer[:, slot, :, :num_entries] = new.to(buffer.device)
        self.start_positions[slot], self._end_positions[slot] = start, length
