"""The block: the rows that one forward of a model appends to each sequence; and how a layer scores its keys."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from longdraft.attention.transfer import to_device


@dataclass(frozen=True, eq=False)
class ScoreModifiers:
    """Changes of a layer's scores besides scaling.

    Attributes:
        softcap: scores s become softcap * tanh(s / softcap) before the mask (Gemma 2); None for no cap.
        sinks: (Hq,) float32, a learned score of each head that joins the softmax's denominator and has no value
            (gpt-oss); None for no sinks.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None


NO_MODIFIERS = ScoreModifiers()


@dataclass(frozen=True)
class ForwardBatch:
    """T new rows for each of B sequences. Every row sees its sequence's whole prefix.

    Row i of sequence b is written to cache row ``lengths[b] + offset + i`` of slot ``slots[b]``, which is scratch space
    until the accepted path is committed. A tree that grows level by level writes one block for each level; ``tree_offset``
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
        slots_t, prefix_lens_t: slots and lengths as (B,) int32 tensors on the cache's device.
        tokens, positions: (B, T) token ids and position ids on the cache's device; None if only attention is computed.
        offset: the tree offset, unverified rows between the prefix and this block, the same for all sequences.
        bases: B host integers, the row of the whole text that each tree begins at; they differ from ``prefix_lens`` where
            the block is laid on a selection of the text's rows.
        begins: (B, T) int32, the first rank that each row sees, where a layer sees the last rows only; None if every
            row sees its whole prefix. The rank of a prefix row is its index, the rank of a tree row is the prefix
            length + the number of its ancestors in the tree.
        captured: True if the forward is recorded once and replayed with other numbers in the tensors. Slots and lengths
            must then be read from the tensors: the host's slots have no meaning, and its lengths are upper bounds.
        write_starts_t: (B,) int32, the cache row that each sequence's first new row is written to; None: behind the prefix and
            the tree before it. A captured block is padded with sequences that write where nobody reads.
        prompt: True if the rows are part of a prompt, False in decoding. In decoding a row's result must not depend on
            the rows beside it, so one product serves any number of rows; prompts use the fastest product.
        text: tokens of the whole prompt that the rows are a piece of; 0: each row is the last one of its text. Rotary
            embeddings that depend on a text's length ask for it.
        derived: values that an attention path computes in its first layer and reuses in the others. They hold for one
            forward: a copy of the block (``dataclasses.replace``) starts with an empty dict.
    """

    slots: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    query_len: int
    mask: torch.Tensor | None
    slots_t: torch.Tensor
    prefix_lens_t: torch.Tensor
    token_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    tree_offset: int = 0
    root_positions: tuple[int, ...] = ()
    window_starts: torch.Tensor | None = None
    is_captured: bool = False
    write_starts_t: torch.Tensor | None = None
    is_prefill: bool = False
    prompt_len: int = 0
    metadata: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @classmethod
    def make(
        cls,
        slots: Sequence[int],
        prefix_lens: Sequence[int],
        query_len: int,
        mask: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        tree_offset: int = 0,
        is_prefill: bool = False,
        token_ids: Sequence[Sequence[int]] | torch.Tensor | None = None,
        positions: Sequence[Sequence[int]] | torch.Tensor | None = None,
        root_positions: Sequence[int] | None = None,
        prompt_len: int = 0,
    ) -> ForwardBatch:
        if mask is not None and mask.shape != (len(slots), query_len, tree_offset + query_len):
            raise ValueError(
                f"mask is {tuple(mask.shape)}, expected {(len(slots), query_len, tree_offset + query_len)}"
            )
        return cls(
            slots=tuple(slots),
            prefix_lens=tuple(prefix_lens),
            query_len=query_len,
            mask=None if mask is None else to_device(mask, device),
            slots_t=to_device(slots, device, torch.int32),
            prefix_lens_t=to_device(prefix_lens, device, torch.int32),
            token_ids=None if token_ids is None else to_device(token_ids, device),
            positions=None if positions is None else to_device(positions, device),
            tree_offset=tree_offset,
            root_positions=tuple(prefix_lens if root_positions is None else root_positions),
            is_prefill=is_prefill,
            prompt_len=prompt_len,
        )

    @property
    def batch_size(self) -> int:
        return len(self.slots)

    @property
    def tree_len(self) -> int:
        """Rows of the tree behind the prefix, including this block's."""
        return self.tree_offset + self.query_len

    def tree_mask(self, sequence_index: int, device: torch.device) -> torch.Tensor:
        """(T, offset + T) bool mask of sequence ``sequence_index``; the causal triangle for a chain."""
        if self.mask is not None:
            return self.mask[sequence_index]
        return torch.ones(self.query_len, self.tree_len, dtype=torch.bool, device=device).tril(self.tree_offset)

    def depths(self, device: torch.device) -> torch.Tensor:
        """(B, T) depth of each row in its tree: the number of its ancestors."""
        if self.mask is None:
            return torch.arange(self.tree_offset, self.tree_len, device=device).expand(self.batch_size, -1)
        return self.mask.sum(-1) - 1

    def full_mask(self, sequence_index: int, device: torch.device) -> torch.Tensor:
        """(T, prefix + offset + T) bool mask of sequence ``sequence_index``, its prefix and ``window_starts`` included."""
        n = self.prefix_lens[sequence_index]
        tree = self.tree_mask(sequence_index, device)
        prefix = torch.ones(self.query_len, n, dtype=torch.bool, device=device)
        if self.window_starts is None:
            return torch.cat([prefix, tree], dim=1)
        ranks = torch.cat([torch.arange(n, device=device).expand(self.query_len, -1), n + tree.cumsum(1) - 1], dim=1)
        return torch.cat([prefix, tree], dim=1) & (ranks >= self.window_starts[sequence_index].to(device).unsqueeze(1))

    def last_tokens(self, count: int) -> ForwardBatch:
        """The last ``count`` rows as a block of their own, behind the others: for layers that compute only these."""
        if count == self.query_len:
            return self
        seen = self.mask
        if seen is None and self.tree_len > 1:
            seen = torch.ones(self.query_len, self.tree_len, dtype=torch.bool, device=self.slots_t.device).tril(
                self.tree_offset
            )
            seen = seen.expand(self.batch_size, -1, -1)
        return replace(
            self,
            query_len=count,
            tree_offset=self.tree_len - count,
            mask=None if seen is None else seen[:, -count:],
            window_starts=None if self.window_starts is None else self.window_starts[:, -count:],
            token_ids=None if self.token_ids is None else self.token_ids[:, -count:],
            positions=None if self.positions is None else self.positions[..., -count:],
        )
