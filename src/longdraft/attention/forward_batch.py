"""The tokens that one forward appends to each sequence, and the score modifiers of an attention layer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from longdraft.attention.transfer import to_device


@dataclass(frozen=True, eq=False)
class ScoreModifiers:
    """Changes of a layer to its attention scores, besides their scale.

    Attributes:
        softcap: scores s become softcap * tanh(s / softcap) before the mask (Gemma 2); None: no soft cap.
        sinks: (Hq,) float32, each head's learned score, whose exp is added to the softmax denominator (gpt-oss); None:
            no sinks.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None


NO_MODIFIERS = ScoreModifiers()


@dataclass(frozen=True)
class ForwardBatch:
    """T new tokens for each of B sequences. Every token attends to its sequence's whole prefix.

    Token i of sequence b is written to entry ``prefix_lens[b] + tree_offset + i`` of slot ``slots[b]`` in the KV cache.
    The entry is scratch until the accepted path is committed. A tree that grows level by level takes a batch for each
    level. A token attends to the whole prefix ``[0, prefix_lens[b])``, and to the tree tokens that ``mask`` allows.
    :meth:`longdraft.memory.store.KVStore.make_forward_batch` makes a batch.

    Slots and lengths are both host integers, for code that loops over sequences, and device tensors, for kernels, so
    neither has to synchronise.

    Attributes:
        slots: B host integers, the KV cache slot of each sequence.
        prefix_lens: B host integers, the committed KV entries of each sequence.
        query_len: T, new tokens of each sequence. Shorter trees are padded.
        mask: (B, T, tree_offset + T) bool, True where token i attends to token j of the tree; None for a causal chain.
        slots_t, prefix_lens_t: (B,) int32, ``slots`` and ``prefix_lens`` on the cache's device.
        token_ids, positions: (B, T) on the cache's device; None if only attention is computed.
        tree_offset: number of uncommitted tokens of the tree that earlier levels wrote, equal for all sequences.
        root_positions: B host integers, the position of each tree's root. Positions differ from ``prefix_lens`` if the
            cache holds a selection of the context.
        window_starts: (B, T) int32, the first rank that each token attends to in a sliding window; None: no window. The
            rank of a prefix entry is its index, the rank of a tree token is prefix_len + the number of its ancestors.
        is_captured: True if the forward is captured in a CUDA graph, and replayed with other contents of its tensors.
            Then host slots have no meaning, and host lengths are upper bounds.
        write_starts_t: (B,) int32, the entry that each sequence's first new token is written to; None: the entry behind
            prefix and tree. A captured batch is padded with sequences that write to scratch memory instead.
        is_prefill: True if the tokens are part of a prompt, where matrix products are chosen for speed. In decoding
            (False) one kind of product serves any number of tokens, so a token's bits never depend on the batch.
        prompt_len: tokens of the whole prompt in prefill; 0 in decoding, where each token is the last of its context.
            Needed by rotary embeddings that depend on the context length.
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
        """Makes a batch from host values, with copies on the device."""
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
        """Tokens of the tree behind the prefix, the new tokens included."""
        return self.tree_offset + self.query_len

    def tree_mask(self, sequence_index: int, device: torch.device) -> torch.Tensor:
        """(T, tree_len) bool mask of a sequence; the causal triangle for a chain."""
        if self.mask is not None:
            return self.mask[sequence_index]
        return torch.ones(self.query_len, self.tree_len, dtype=torch.bool, device=device).tril(self.tree_offset)

    def depths(self, device: torch.device) -> torch.Tensor:
        """(B, T) depth of each token in its tree: the number of its ancestors."""
        if self.mask is None:
            return torch.arange(self.tree_offset, self.tree_len, device=device).expand(self.batch_size, -1)
        return self.mask.sum(-1) - 1

    def full_mask(self, sequence_index: int, device: torch.device) -> torch.Tensor:
        """(T, prefix_len + tree_len) bool mask of a sequence: prefix, tree and sliding window."""
        n = self.prefix_lens[sequence_index]
        tree = self.tree_mask(sequence_index, device)
        prefix = torch.ones(self.query_len, n, dtype=torch.bool, device=device)
        if self.window_starts is None:
            return torch.cat([prefix, tree], dim=1)
        ranks = torch.cat([torch.arange(n, device=device).expand(self.query_len, -1), n + tree.cumsum(1) - 1], dim=1)
        return torch.cat([prefix, tree], dim=1) & (ranks >= self.window_starts[sequence_index].to(device).unsqueeze(1))

    def last_tokens(self, count: int) -> ForwardBatch:
        """Returns the batch of only the last ``count`` tokens, for layers that compute nothing else."""
        if count == self.query_len:
            return self
        mask = self.mask
        if mask is None and self.tree_len > 1:
            mask = self.tree_mask(0, self.slots_t.device).expand(self.batch_size, -1, -1)
        return replace(
            self,
            query_len=count,
            tree_offset=self.tree_len - count,
            mask=None if mask is None else mask[:, -count:],
            window_starts=None if self.window_starts is None else self.window_starts[:, -count:],
            token_ids=None if self.token_ids is None else self.token_ids[:, -count:],
            positions=None if self.positions is None else self.positions[..., -count:],
        )
