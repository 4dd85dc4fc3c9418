"""LongSpec's block: self-attention to a window, cross-attention to the target's last layer (section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from longdraft.drafters.shared.layers import ALL, Attention, Going, SelfAttend, SwiGLU, initialise

# q (Hq, T, d) -> output (Hq, T, d)
CrossAttend = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LongSpecShape:
    """Sizes of the block. Head counts and sizes are the target's, or its KV could not be read."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    window: int = 512
    """Keys that self-attention sees, the query's own included."""
    final_norm: bool = False
    """An RMSNorm before the head. The paper has none; with it, training is stable at a higher learning rate."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class LongSpecBlock(nn.Module):
    """The block. Its state dict is the published layout without the cross-attention's unused k and v."""

    def __init__(self, shape: LongSpecShape) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        sizes = size, size, shape.heads
        self.self_attn = Attention(*sizes, shape.kv_heads, shape.head_dim, bias=True)
        self.post_self_attention_layernorm = nn.RMSNorm(size, eps)
        self.cross_attn = Attention(*sizes, 0, shape.head_dim, bias=True)
        self.post_cross_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)
        self.norm = nn.RMSNorm(size, eps) if shape.final_norm else nn.Identity()

    def initialise(self, seed: int = 0, std: float = 0.02) -> None:
        """Normal weights, zero biases, and zero output projections: the block starts as the identity."""
        initialise(self, seed, std)
        if self.shape.final_norm:
            with torch.no_grad():
                self.norm.get_parameter("weight").fill_(0.5)  # small logits: at first the block repeats its input

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Self-attention's keys (after RoPE) and values (Hkv, T, d) of embeddings x (T, hidden).

        They depend only on token and position, so a prefill computes just these, for the last window.
        """
        return self.self_attn.keys_values(self.input_layernorm(x), cos, sin)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        self_attend: SelfAttend,
        cross_attend: CrossAttend,
        queries: Going = ALL,
    ) -> torch.Tensor:
        """The block over T rows.

        Args:
            x: (T, hidden) token embeddings.
            cos, sin: (T, d) rotary embedding at the rows' positions.
            self_attend: attends among the rows, and to the window that it holds.
            cross_attend: attends to the target's last-layer KV.
            queries: the rows to compute an output for; by default all. Keys and values are computed for every row.

        Returns:
            (Tq, hidden): the head's input.
        """
        cross = self.cross_attn
        h = x[queries] + self.self_attn(self.input_layernorm(x), cos, sin, self_attend, queries)
        q = cross.queries(self.post_self_attention_layernorm(h), cos[queries], sin[queries])
        h = h + cross.merge(cross_attend(q))
        out: torch.Tensor = self.norm(h + self.mlp(self.post_cross_attention_layernorm(h)))
        return out
