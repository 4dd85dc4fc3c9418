"""LongSpec's block: self-attention to a window, cross-attention to the target's last layer (section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from longdraft.drafters.shared.layers import SelfAttend, SwiGLU, rotate
from longdraft.native.boundary import FLOATS

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


class _Attention(nn.Module):
    """Projections of an attention: biased q (and k, v), unbiased o."""

    def __init__(self, shape: LongSpecShape, own_keys: bool) -> None:
        super().__init__()
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, inner)
        if own_keys:
            self.k_proj = nn.Linear(shape.hidden_size, kv)
            self.v_proj = nn.Linear(shape.hidden_size, kv)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(T, heads * d) -> (heads, T, d)."""
        return x.view(x.shape[0], -1, self.head_dim).transpose(0, 1)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """(heads, T, d) -> (T, hidden)."""
        out: torch.Tensor = self.o_proj(x.transpose(0, 1).reshape(x.shape[1], -1))
        return out


class LongSpecBlock(nn.Module):
    """The block. Its state dict is the published layout without the cross-attention's unused k and v."""

    def __init__(self, shape: LongSpecShape) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = _Attention(shape, own_keys=True)
        self.post_self_attention_layernorm = nn.RMSNorm(size, eps)
        self.cross_attn = _Attention(shape, own_keys=False)
        self.post_cross_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)
        self.norm = nn.RMSNorm(size, eps) if shape.final_norm else nn.Identity()

    def initialise(self, seed: int = 0, std: float = 0.02) -> None:
        """Normal weights, zero biases, and zero output projections: the block starts as the identity."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("layernorm.weight"):
                    parameter.fill_(1.0)
                elif name == "norm.weight":
                    parameter.fill_(0.5)  # small logits: at first the block repeats its input
                elif name.endswith(("bias", "o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
                else:
                    parameter.copy_(torch.empty(parameter.shape, **FLOATS).normal_(0.0, std, generator=generator))

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Self-attention's keys (after RoPE) and values (Hkv, T, d) of embeddings x (T, hidden).

        They depend only on token and position, so a prefill computes just these, for the last window.
        """
        n = self.input_layernorm(x)
        own = self.self_attn
        return rotate(own.split(own.k_proj(n)), cos, sin), own.split(own.v_proj(n))

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        self_attend: SelfAttend,
        cross_attend: CrossAttend,
        queries: slice | torch.Tensor = slice(None),
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
        own, cross = self.self_attn, self.cross_attn
        n = self.input_layernorm(x)
        k, v = rotate(own.split(own.k_proj(n)), cos, sin), own.split(own.v_proj(n))
        x, n, cos, sin = x[queries], n[queries], cos[queries], sin[queries]
        q = rotate(own.split(own.q_proj(n)), cos, sin)
        h = x + own.merge(self_attend(q, k, v))
        q = rotate(cross.split(cross.q_proj(self.post_self_attention_layernorm(h))), cos, sin)
        h = h + cross.merge(cross_attend(q))
        out: torch.Tensor = self.norm(h + self.mlp(self.post_cross_attention_layernorm(h)))
        return out
