"""Builds the structures of kernels.h for a draft (``struct``) from tensors, and keeps the tensors alive."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from longdraft.native.boundary import address
from longdraft.native.header import STRUCTURES, Int64
from longdraft.native.structures import LinearWeights, Matrix, matrix_struct

NORM_NAMES = ("norm", "feature_norm", "cross_norm", "mlp_norm", "final_norm")
PROJECTION_NAMES = ("q", "k", "v", "o", "cross_q", "cross_o", "gate", "up", "down", "head")


@dataclass(eq=False)
class DraftBlock:
    """A draft's decoder block and head.

    Attributes:
        norms: name in :data:`NORM_NAMES` -> weight (hidden_size,); ``feature_norm`` for EAGLE-3 only.
        projections: name in :data:`PROJECTION_NAMES` -> weights.
        num_heads, num_kv_heads, head_dim: number of query heads; of KV heads; size of a head, a multiple of 16.
        eps: epsilon of all norms.
        norm_before_residual: True: the attention's residual is the normalized input; False: the input itself.
        vocab_size: number of tokens in the head's output, which may be fewer than the target's.
    """

    norms: Mapping[str, torch.Tensor]
    projections: Mapping[str, LinearWeights]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        norms, projections = self.norms, self.projections
        self.hidden_size, self.vocab_size = norms["norm"].shape[0], projections["head"][0].shape[0]
        self.struct = STRUCTURES["DraftBlock"](
            *(address(norms.get(name), min_numel=self.hidden_size) for name in NORM_NAMES),
            *(self.eps, self.head_dim**-0.5),
            *(matrix_struct(projections[name]) if name in projections else Matrix() for name in PROJECTION_NAMES),
            *(self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim),
            *(projections["gate"][0].shape[0], self.norm_before_residual),
        )


@dataclass(eq=False)
class DraftLevelInput:
    """The new tokens of all sequences, one sequence behind the other. The kernel writes the KV of all new tokens, but
    computes outputs only for the last ``query_len`` tokens of each sequence.

    Attributes:
        query_len: number of tokens of each sequence that have outputs.
        num_tokens: number of new tokens of each sequence, at least query_len.
        slots: slot of each sequence, the same in the draft's and in the target's KV cache.
        embeds: token embeddings (tokens, hidden_size).
        features: features of the target (tokens, hidden_size) for EAGLE-3; None for LongSpec.
        cos, sin: RoPE (tokens, head_dim).
        kv_starts, kv_lens: a sequence sees entries [start, len) of the draft's KV, the last of which are new tokens'.
        mask: (sequences, query_len, width) bool, True where a token sees one of the last ``width`` entries; tokens see
            all entries before these. None: tokens see all entries.
        target_kv_lens: for LongSpec: number of the target's KV entries that each sequence sees; else None.
        num_queries: number of tokens that have outputs, of all sequences.
    """

    query_len: int
    num_tokens: Sequence[int]
    slots: Sequence[int]
    embeds: torch.Tensor
    features: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    kv_starts: Sequence[int]
    kv_lens: Sequence[int]
    mask: torch.Tensor | None = None
    target_kv_lens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self.num_queries = len(self.num_tokens) * self.query_len
        inputs = self.embeds, self.features, self.cos, self.sin, self.mask
        embeds, features, cos, sin, mask = tensors = [None if t is None else t.contiguous() for t in inputs]
        lists = self.num_tokens, self.slots, self.kv_starts, self.kv_lens, self.target_kv_lens
        numbers = [None if n is None else (Int64 * len(n))(*n) for n in lists]
        self._keepalive = tensors, numbers
        num_tokens, slots, kv_starts, kv_lens, target_kv_lens = (
            None if n is None else ctypes.addressof(n) for n in numbers
        )
        self.struct = STRUCTURES["DraftLevelInput"](
            *(len(self.num_tokens), self.query_len, num_tokens, slots),
            *(*map(address, (embeds, features, cos, sin)), kv_starts, kv_lens),
            *(address(mask, torch.bool), 0 if mask is None else mask.shape[-1], target_kv_lens),
        )
