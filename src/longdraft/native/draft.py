"""Structures of kernels.h for a draft. The classes build them from tensors, and keep the tensors alive."""

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
        head_dim: size of a head, a multiple of 16.
        eps: epsilon of all norms.
        norm_before_residual: True: the attention's residual is the normalized input.
        vocab_size: number of the head's outputs.
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
    """New tokens of B sequences. KV is written for all tokens; only the last W of each sequence have outputs.

    Attributes:
        query_len: W.
        num_tokens: number of new tokens of each sequence, at least W.
        slots: each sequence's slot, in the draft's cache and in the target's store alike.
        embeds: token embeddings (tokens, hidden_size).
        features: (tokens, hidden_size), concatenated with ``embeds`` by EAGLE-3; None for LongSpec.
        cos, sin: RoPE (tokens, head_dim).
        kv_starts, kv_lens: each sequence sees entries [start, len) of the draft's KV, of which the new tokens are last.
        mask: (B, W, S) bool, True where a token sees one of the last S entries; None if it sees all.
        target_kv_lens: LongSpec only: number of the target's KV entries that each sequence sees.
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
        tensors = [None if t is None else t.contiguous() for t in inputs]
        lists = self.num_tokens, self.slots, self.kv_starts, self.kv_lens, self.target_kv_lens
        numbers = [None if n is None else (Int64 * len(n))(*n) for n in lists]
        self._keepalive = tensors, numbers
        num_tokens, slots, kv_starts, kv_lens, target_kv_lens = (
            None if n is None else ctypes.addressof(n) for n in numbers
        )
        self.struct = STRUCTURES["DraftLevelInput"](
            *(len(self.num_tokens), self.query_len, num_tokens, slots, *map(address, tensors[:4]), kv_starts, kv_lens),
            *(address(tensors[4], torch.bool), 0 if self.mask is None else self.mask.shape[-1], target_kv_lens),
        )
