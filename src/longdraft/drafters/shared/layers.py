"""Layers that several drafters are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from longdraft.native.boundary import FLOATS

# q (Hq, T, d), k and v (Hkv, T', d) of the same call, after RoPE -> output (Hq, T, d)
SelfAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# The rows of a call that get an output.
Going = slice | torch.Tensor
ALL = slice(None)


class SwiGLU(nn.Module):
    """The gated MLP of a Llama layer."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """An attention's projections of rows n (T, size), and RoPE; whoever calls it attends.

    Args:
        size: of the rows. hidden: of the output.
        kv_heads: 0 for an attention to keys that another model has computed.
        bias: of q, k and v. output_bias: of o.
        eps: of the norms of each head's queries and keys; None without such norms.
    """

    def __init__(
        self,
        size: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        output_bias: bool = False,
        eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(size, heads * head_dim, bias=bias)
        if kv_heads:
            self.k_proj = nn.Linear(size, kv_heads * head_dim, bias=bias)
            self.v_proj = nn.Linear(size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=output_bias)
        self.q_norm, self.k_norm = (nn.Identity() if eps is None else nn.RMSNorm(head_dim, eps) for _ in "qk")

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(T, heads * d) -> (heads, T, d)."""
        return x.view(x.shape[0], -1, self.head_dim).transpose(0, 1)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """(heads, T, d) -> (T, hidden)."""
        out: torch.Tensor = self.o_proj(x.transpose(0, 1).reshape(x.shape[1], -1))
        return out

    def queries(self, n: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries after RoPE (Hq, T, d); cos and sin (T, d) at the rows' positions."""
        return rotate(self.q_norm(self.split(self.q_proj(n))), cos, sin)

    def keys_values(self, n: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys after RoPE, and values (Hkv, T, d)."""
        return rotate(self.k_norm(self.split(self.k_proj(n))), cos, sin), self.split(self.v_proj(n))

    def forward(
        self, n: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: SelfAttend, going: Going = ALL
    ) -> torch.Tensor:
        """Outputs (Tq, hidden) of the rows that go on, by what attends; all rows have keys and values."""
        keys, values = self.keys_values(n, cos, sin)
        return self.merge(attend(self.queries(n[going], cos[going], sin[going]), keys, values))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in the half-split convention. x (heads, T, d); cos, sin (T, d), of any dtype."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-b, a), dim=-1) * sin.to(x.dtype)


def initialise(module: nn.Module, seed: int, std: float) -> None:
    """Normal weights, unit norms, zero biases, and zero output projections: a residual layer starts as the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(("bias", "o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            else:
                parameter.copy_(torch.empty(parameter.shape, **FLOATS).normal_(0.0, std, generator=generator))
