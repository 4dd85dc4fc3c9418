"""The block: the rows that one forward of a model appends to each sequence; and how a layer scores its keys."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from longdraft.attention.transfer import on_device


@dataclass(frozen=True, eq=False)
class Scoring:
    """Changes of a layer's scores besides scaling.

    Attributes:
        softcap: scores s become softcap * tanh(s / softcap) before the mask (Gemma 2); None for no cap.
        sinks: (Hq,) float32, a learned score of each head that joins the softmax's denominator and has no value
            (gpt-oss); None for no sinks.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None


PLAIN = Scoring()


@dataclass(frozen=True)
class Block:
    """T new rows for each of B sequences. Every row sees its sequence's whole prefix.

    Row i of sequence b is written to cache row ``lengths[b] + offset + i`` of slot ``slots[b]``, which is scratch space
    until the accepted path is committed. A tree that grows level by level writes one block for each level; ``offset``
    counts the rows that earlier levels wrote between the prefix and this block. A row sees all of the prefix
    ``[0, lengths[b])`` and those of the tree's ``offset + T`` rows that ``mask`` allows.

    :meth:`longdraft.memory.store.KVStore.block` makes one.

    Slots and lengths are kept twice, as host integers and as device tensors: paths that loop over sequences read the
    integers, kernels read the tensors, and neither has to synchronise.

    Attributes:
        slots: cache slot of each sequence, B host integers.
        lengths: committed prefix length of each sequence, B host integers.
        size: T, rows of each sequence (shorter trees are padded).
        mask: (B, T, offset + T) bool, True where row i may see row j of the tree; None for a causal chain.
        slots_t, lengths_t: slots and lengths as (B,) int32 tensors on the cache's device.
        tokens, positions: (B, T) token ids and position ids on the cache's device; None if only attention is computed.
        offset: the tree offset, unverified rows between the prefix and this block, the same for all sequences.
        bases: B host integers, the row of the whole text that each tree begins at; they differ from ``lengths`` where
            the block is laid on a selection of the text's rows.
        begins: (B, T) int32, the first rank that each row sees, where a layer sees the last rows only; None if every
            row sees its whole prefix. The rank of a prefix row is its index, the rank of a tree row is the prefix
            length + the number of its ancestors in the tree.
        captured: True if the forward is recorded once and replayed with other numbers in the tensors. Slots and lengths
            must then be read from the tensors: the host's slots have no meaning, and its lengths are upper bounds.
        into_t: (B,) int32, the cache row that each sequence's first new row is written to; None: behind the prefix and
            the tree before it. A captured block is padded with sequences that write where nobody reads.
        prompt: True if the rows are part of a prompt, False in decoding. In decoding a row's result must not depend on
            the rows beside it, so one product serves any number of rows; prompts use the fastest product.
        text: tokens of the whole prompt that the rows are a piece of; 0: each row is the last one of its text. Rotary
            embeddings that depend on a text's length ask for it.
        derived: values that an attention path computes in its first layer and reuses in the others. They hold for one
            forward: a copy of the block (``dataclasses.replace``) starts with an empty dict.
    """

    slots: tuple[int, ...]
    lengths: tuple[int, ...]
    size: int
    mask: torch.Tensor | None
    slots_t: torch.Tensor
    lengths_t: torch.Tensor
    tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    offset: int = 0
    bases: tuple[int, ...] = ()
    begins: torch.Tensor | None = None
    captured: bool = False
    into_t: torch.Tensor | None = None
    prompt: bool = False
    text: int = 0
    derived: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @classmethod
    def make(
        cls,
        slots: Sequence[int],
        lengths: Sequence[int],
        size: int,
        mask: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        offset: int = 0,
        prompt: bool = False,
        tokens: Sequence[Sequence[int]] | torch.Tensor | None = None,
        positions: Sequence[Sequence[int]] | torch.Tensor | None = None,
        bases: Sequence[int] | None = None,
        text: int = 0,
    ) -> Block:
        if mask is not None and mask.shape != (len(slots), size, offset + size):
            raise ValueError(f"mask is {tuple(mask.shape)}, expected {(len(slots), size, offset + size)}")
        return cls(
            slots=tuple(slots),
            lengths=tuple(lengths),
            size=size,
            mask=None if mask is None else on_device(mask, device),
            slots_t=on_device(slots, device, torch.int32),
            lengths_t=on_device(lengths, device, torch.int32),
            tokens=None if tokens is None else on_device(tokens, device),
            positions=None if positions is None else on_device(positions, device),
            offset=offset,
            bases=tuple(lengths if bases is None else bases),
            prompt=prompt,
            text=text,
        )

    @property
    def batch(self) -> int:
        return len(self.slots)

    @property
    def width(self) -> int:
        """Rows of the tree behind the prefix, including this block's."""
        return self.offset + self.size

    def block_mask(self, index: int, device: torch.device) -> torch.Tensor:
        """(T, offset + T) bool mask of sequence ``index``; the causal triangle for a chain."""
        if self.mask is not None:
            return self.mask[index]
        return torch.ones(self.size, self.width, dtype=torch.bool, device=device).tril(self.offset)

    def depths(self, device: torch.device) -> torch.Tensor:
        """(B, T) depth of each row in its tree: the number of its ancestors."""
        if self.mask is None:
            return torch.arange(self.offset, self.width, device=device).expand(self.batch, -1)
        return self.mask.sum(-1) - 1

    def visible(self, index: int, device: torch.device) -> torch.Tensor:
        """(T, prefix + offset + T) bool mask of sequence ``index``, its prefix and ``begins`` included."""
        n = self.lengths[index]
        tree = self.block_mask(index, device)
        prefix = torch.ones(self.size, n, dtype=torch.bool, device=device)
        if self.begins is None:
            return torch.cat([prefix, tree], dim=1)
        ranks = torch.cat([torch.arange(n, device=device).expand(self.size, -1), n + tree.cumsum(1) - 1], dim=1)
        return torch.cat([prefix, tree], dim=1) & (ranks >= self.begins[index].to(device).unsqueeze(1))

    def last_rows(self, count: int) -> Block:
        """The last ``count`` rows as a block of their own, behind the others: for layers that compute only these."""
        if count == self.size:
            return self
        seen = self.mask
        if seen is None and self.width > 1:
            seen = torch.ones(self.size, self.width, dtype=torch.bool, device=self.slots_t.device).tril(self.offset)
            seen = seen.expand(self.batch, -1, -1)
        return replace(
            self,
            size=count,
            offset=self.width - count,
            mask=None if seen is None else seen[:, -count:],
            begins=None if self.begins is None else self.begins[:, -count:],
            tokens=None if self.tokens is None else self.tokens[:, -count:],
            positions=None if self.positions is None else self.positions[..., -count:],
        )
