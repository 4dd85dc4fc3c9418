"""The structures Draft and Nodes of kernels.h: a draft's level, made of tensors, which the classes keep alive."""

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
    """The block and head of a draft.

    Attributes:
        norms: name -> weights (hidden,), for some of :data:`NORM_NAMES`; with ``feature_norm`` the block is EAGLE-3's.
        projections: name -> weights, for some of :data:`PROJECTION_NAMES`.
        heads, num_kv_heads, d: query heads, KV heads, head size, a multiple of 16.
        eps: epsilon of the norms.
        normed_residual: True if the residual of the attention is the normalised joined input.
        hidden, vocabulary: the size of its rows; rows of the head.
    """

    norms: Mapping[str, torch.Tensor]
    projections: Mapping[str, LinearWeights]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    normed_residual: bool = False

    def __post_init__(self) -> None:
        norms, products = self.norms, self.projections
        self.hidden_size, self.vocab_size = norms["norm"].shape[0], products["head"][0].shape[0]
        self.struct = STRUCTURES["Draft"](
            *(address(norms.get(name), min_numel=self.hidden_size) for name in NORM_NAMES),
            *(self.eps, self.head_dim**-0.5),
            *(matrix_struct(products[name]) if name in products else Matrix() for name in PROJECTION_NAMES),
            *(
                self.hidden_size,
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                products["gate"][0].shape[0],
                self.normed_residual,
            ),
        )


@dataclass(eq=False)
class DraftLevelInput:
    """Rows of B sequences. Keys and values of all rows are written; only the last W of each sequence go on.

    Attributes:
        width: W.
        counts: number of rows of each sequence, at least W.
        slots: slot of each sequence in the draft's cache and in the target's store.
        x, joined: (rows, hidden) token embeddings, and the features that EAGLE-3 joins with them.
        cos, sin: (rows, d) RoPE at the rows' positions.
        begins, ends: each sequence sees the draft's keys [begin, end), the last of which are the rows' own.
        mask: (B, W, S) bool, True where a row sees one of the last S keys; None if all are seen.
        lengths: for LongSpec, the number of the target's keys that each sequence sees.
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
        tensors = [
            None if t is None else t.contiguous() for t in (self.embeds, self.features, self.cos, self.sin, self.mask)
        ]
        lists = self.num_tokens, self.slots, self.kv_starts, self.kv_lens, self.target_kv_lens
        numbers = [None if n is None else (Int64 * len(n))(*n) for n in lists]
        self._alive = tensors, numbers
        counts, slots, begins, ends, lengths = (None if n is None else ctypes.addressof(n) for n in numbers)
        self.struct = STRUCTURES["Nodes"](
            *(len(self.num_tokens), self.query_len, counts, slots, *map(address, tensors[:4]), begins, ends),
            *(address(tensors[4], torch.bool), 0 if self.mask is None else self.mask.shape[-1], lengths),
        )
