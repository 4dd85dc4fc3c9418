"""The block: what one forward of the target appends to each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longdraft.attention.transfer import on_device


@dataclass(frozen=True)
class Block:
    """T new tokens for each of B sequences, against each sequence's own prefix.

    Row i of sequence b sits at cache row ``lengths[b] + behind + i`` of slot ``slots[b]``: in scratch space, until the
    accepted path is committed. With ``behind`` = 0 that is directly behind the prefix. A tree that grows level by
    level writes one block a level: ``behind`` rows of it, written by earlier forwards, then lie between the prefix and
    this block. Every row sees the whole prefix ``[0, lengths[b])``; of the tree's rows, the block's own the last of
    them, it sees what ``mask`` allows.

    Host integers and device tensors of the same numbers stand side by side: paths that loop over sequences
    read the former, kernels read the latter, and neither has to synchronise.

    Attributes:
        slots: cache slot of each sequence, B host integers.
        lengths: committed prefix length of each sequence, B host integers.
        size: T, rows a sequence (shorter trees are padded up to it).
        mask: (B, T, behind + T) bool, True where row i may see row j of the tree; None for a causal chain.
        slots_t, lengths_t: the same numbers as (B,) int32 tensors on the cache's device.
        behind: uncommitted rows between the prefix and this block, the same for all sequences.
        captured: the forward is recorded once and replayed with other numbers in the tensors: what depends on slots and
            lengths has to be read from these. The host's slots then mean nothing, and its lengths are upper bounds.
        prompt: part of a prompt that is read, not decoding. In decoding a row's result must not depend on the rows
            beside it, so one product serves any number of rows; a long piece of a prompt takes the fastest.
    """

    slots: tuple[int, ...]
    lengths: tuple[int, ...]
    size: int
    mask: torch.Tensor | None
    slots_t: torch.Tensor
    lengths_t: torch.Tensor
    behind: int = 0
    captured: bool = False
    prompt: bool = False

    @classmethod
    def make(
        cls,
        slots: Sequence[int],
        lengths: Sequence[int],
        size: int,
        mask: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        behind: int = 0,
        prompt: bool = False,
    ) -> Block:
        if mask is not None and mask.shape != (len(slots), size, behind + size):
            raise ValueError(f"mask is {tuple(mask.shape)}, expected {(len(slots), size, behind + size)}")
        return cls(
            slots=tuple(slots),
            lengths=tuple(lengths),
            size=size,
            mask=None if mask is None else on_device(mask, device),
            slots_t=on_device(slots, device, torch.int32),
            lengths_t=on_device(lengths, device, torch.int32),
            behind=behind,
            prompt=prompt,
        )

    @property
    def batch(self) -> int:
        return len(self.slots)

    @property
    def width(self) -> int:
        """Rows of the tree behind the prefix, this block's included."""
        return self.behind + self.size

    def block_mask(self, index: int, device: torch.device) -> torch.Tensor:
        """(T, behind + T) bool mask of sequence ``index``; the causal triangle for a chain."""
        if self.mask is not None:
            return self.mask[index]
        return torch.ones(self.size, self.width, dtype=torch.bool, device=device).tril(self.behind)
