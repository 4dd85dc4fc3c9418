"""Describes the tokens that one forward appends to each sequence, and a layer's changes to attention scores."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from longdraft.attention.transfer import to_device


@dataclass(frozen=True, eq=False)
class ScoreModifiers:
    """Changes that a layer makes to its attention scores, besides scaling them.

    Attributes:
        softcap: scores s become softcap * tanh(s / softcap) before the mask (Gemma 2); None: no soft cap.
        sinks: (Hq,) float32, a learned score for each of Hq query heads. The softmax denominator also adds exp of the
            score (gpt-oss). None: no sinks.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None


NO_MODIFIERS = ScoreModifiers()


@dataclass(frozen=True)
class ForwardBatch:
    """T new tokens for each of B sequences: a prompt's chunk, a tree, or one level of a tree that grows by levels.

    Token i of sequence b is written to entry ``prefix_lens[b] + tree_offset + i`` of slot ``slots[b]`` in the KV cache.
    The entry is scratch until the accepted path is committed. The token attends to the sequence's whole prefix, entries
    ``[0, prefix_lens[b])``, and to the tree tokens that ``mask`` allows.
    :meth:`longdraft.memory.store.KVStore.make_forward_batch` makes a batch.

    Slots and lengths are stored twice, so that neither side waits for the other: on the host as integers, for loops
    over sequences, and on the device as tensors (``slots_t``), for kernels.

    Attributes:
        slots: B host integers, the KV cache slot of each sequence.
        prefix_lens: B host integers, the committed KV entries of each sequence.
        query_len: T, the number of new tokens of each sequence. Shorter trees are padded.
        mask: (B, T, tree_offset + T) bool, True where token i attends to token j of the tree; None for a causal chain.
        slots_t, prefix_lens_t: (B,) int32, copies of ``slots`` and ``prefix_lens`` on the cache's device.
        token_ids, positions: (B, T) on the cache's device; None if only attention is computed.
        tree_offset: number of tokens of the tree that earlier levels wrote, equal for all sequences.
        root_positions: B host integers, the position of each tree's root. Positions differ from ``prefix_lens`` if the
            cache holds a selection of the context.
        window_starts: (B, T) int32, the first rank that each token attends to in a sliding window; None: no window. The
            rank of a prefix entry is its index, the rank of a tree token is prefix_len + the number of its ancestors.
        num_first: number of first entries that all tokens see besides their windows.
        is_captured: True if the forward is captured in a CUDA graph, and replayed with other contents of its tensors.
            Then ``slots`` have no meaning, and ``prefix_lens`` are upper bounds.
        write_starts_t: (B,) int32, the entry that each sequence's first new token is written to; None:
            ``prefix_lens[b] + tree_offset``. In CUDA graphs, padding sequences write to scratch entries instead.
        is_prefill: True if the tokens are part of a prompt. Then matrix products are chosen for speed. In decoding
            (False) one kind of product serves any number of tokens, so a token's bits never depend on the batch.
        prompt_len: length of the whole prompt in prefill; 0 in decoding, where each token is the last of its context.
            Rotary embeddings that depend on the context length need it.
        metadata: values that an attention path computes in the first layer and reuses in later layers. A copy of the
            batch (``dataclasses.replace``) begins with an empty dict.
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
    num_first: int = 0
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
        """Makes a batch from host values: copies them to the device. Arguments: see the attributes of the class."""
        if mask is not None and mask.shape != (len(slots), query_len, tree_offset + query_len):
            raise ValueError(f"mask is {tuple(mask.shape)}, not {(len(slots), query_len, tree_offset + query_len)}")
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
        """Number of the tree's tokens behind the prefix, the new tokens included."""
        return self.tree_offset + self.query_len

    def tree_mask(self, sequence_index: int, device: torch.device) -> torch.Tensor:
        """Returns the (T, tree_len) bool mask of a sequence; the causal triangle for a chain."""
        if self.mask is not None:
            return self.mask[sequence_index]
        return torch.ones(self.query_len, self.tree_len, dtype=torch.bool, device=device).tril(self.tree_offset)

    def depths(self, device: torch.device) -> torch.Tensor:
        """Returns (B, T), the depth of each token in the tree: the number of ancestors."""
        if self.mask is None:
            return torch.arange(self.tree_offset, self.tree_len, device=device).expand(self.batch_size, -1)
        return self.mask.sum(-1) - 1

    def full_mask(self, sequence_index: int, device: torch.device) -> torch.Tensor:
        """Returns the (T, prefix_len + tree_len) bool mask of a sequence: prefix, tree and sliding window."""
        prefix_len = self.prefix_lens[sequence_index]
        tree_mask = self.tree_mask(sequence_index, device)
        mask = torch.cat([torch.ones(self.query_len, prefix_len, dtype=torch.bool, device=device), tree_mask], dim=1)
        if self.window_starts is None:
            return mask
        prefix_ranks = torch.arange(prefix_len, device=device).expand(self.query_len, -1)
        ranks = torch.cat([prefix_ranks, prefix_len + tree_mask.cumsum(1) - 1], dim=1)
        in_window = ranks >= self.window_starts[sequence_index].to(device).unsqueeze(1)
        return mask & (in_window | (ranks < self.num_first))

    def last_tokens(self, num_tokens: int) -> ForwardBatch:
        """Returns a batch of only the last ``num_tokens`` tokens, for layers that compute no other tokens."""
        if num_tokens == self.query_len:
            return self
        mask = self.mask
        if mask is None and self.tree_len > 1:
            mask = self.tree_mask(0, self.slots_t.device).expand(self.batch_size, -1, -1)
        return replace(
            self,
            query_len=num_tokens,
            tree_offset=self.tree_len - num_tokens,
            mask=None if mask is None else mask[:, -num_tokens:],
            window_starts=None if self.window_starts is None else self.window_starts[:, -num_tokens:],
            token_ids=None if self.token_ids is None else self.token_ids[:, -num_tokens:],
            positions=None if self.positions is None else self.positions[..., -num_tokens:],
        )
