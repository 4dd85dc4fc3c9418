"""Builds the structures of kernels.h for a draft (``struct``) from tensors, and keeps the tensors alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from longdraft.native.boundary import address
from longdraft.native.structures import LinearWeights, make_struct, matrix_struct


@dataclass(eq=False)
class DraftBlock:
    """A draft's decoder block and head.

    Attributes:
        norms: norm, mlp_norm, final_norm; EAGLE-3: feature_norm; LongSpec: cross_norm -> weight (hidden_size,).
        projections: q, k, v, o, gate, up, down, head; LongSpec: cross_q, cross_o -> weights.
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
        self.struct = make_struct(
            "DraftBlock",
            **{name: address(weight, min_numel=self.hidden_size) for name, weight in norms.items()},
            **{name: matrix_struct(weights) for name, weights in projections.items()},
            eps=self.eps, scale=self.head_dim**-0.5,
            hidden_size=self.hidden_size, n_heads=self.num_heads, n_kv_heads=self.num_kv_heads, d=self.head_dim,
            intermediate_size=projections["gate"][0].shape[0], norm_before_residual=self.norm_before_residual,
        )  # fmt: skip


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
        self.struct = make_struct(
            "DraftLevelInput", n_sequences=len(self.num_tokens), query_len=self.query_len, n_tokens=self.num_tokens,
            slots=self.slots, embeds=self.embeds.contiguous(),
            features=None if self.features is None else self.features.contiguous(),
            cos=self.cos.contiguous(), sin=self.sin.contiguous(), kv_starts=self.kv_starts, kv_lens=self.kv_lens,
            masks=None if self.mask is None else self.mask.contiguous(),
            mask_width=0 if self.mask is None else self.mask.shape[-1], target_kv_lens=self.target_kv_lens,
        )  # fmt: skip
