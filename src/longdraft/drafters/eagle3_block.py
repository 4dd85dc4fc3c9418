"""The EAGLE-3 drafter's module (Li et al. 2025; SpecPV, section 3.1), for training and inference alike.

    g_t = fc(f_t)                           f_t: three hidden states of the target at position t, side by side
    x_t = [RMSNorm(embed(token_{t+1})), RMSNorm(g_t)]
    a_t = g_t + Attn(x_t)                   q, k, v from twice the hidden size; RoPE at position t
    o_t = a_t + SwiGLU(RMSNorm(a_t))
    logits of token_{t+2} = head(RMSNorm(o_t))

Past the tokens that the target has read there are no features: the draft's own o stands in for the next g. Row t of
the module thus joins what the target thought at t with the token that follows; the embedding is the target's own, by
reference, the head the draft's. The module knows neither where keys lie nor who sees what: attention is handed in.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from longdraft.drafters.layers import SelfAttend, SwiGLU, rotate


@dataclass(frozen=True)
class Eagle3Shape:
    """Sizes of the module. Head counts and sizes are its own: its keys live in its own cache.

    Attributes:
        feature_size: numbers of one token's features: as a rule three times the target's hidden size.
        vocabulary: rows of the draft's head.
        norm_before_residual: the residual stream starts from the normed g instead of g (a flag of `speculators`).
        attention_bias: whether q, k and v have biases.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    feature_size: int
    vocabulary: int
    rms_norm_eps: float = 1e-6
    norm_before_residual: bool = False
    attention_bias: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Attention(nn.Module):
    def __init__(self, shape: Eagle3Shape, size: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        inner, kv, bias = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.attention_bias
        self.q_proj = nn.Linear(size, inner, bias=bias)
        self.k_proj = nn.Linear(size, kv, bias=bias)
        self.v_proj = nn.Linear(size, kv, bias=bias)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(T, heads * d) -> (heads, T, d)."""
        return x.view(x.shape[0], -1, self.head_dim).transpose(0, 1)


class Layer(nn.Module):
    """The decoder layer.

    Args:
        joins: its attention reads x and g side by side, each behind a norm of its own; else one vector, as it comes.
    """

    def __init__(self, shape: Eagle3Shape, joins: bool = True) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        if joins:
            self.input_layernorm = nn.RMSNorm(size, eps)
            self.hidden_norm = nn.RMSNorm(size, eps)
        self.self_attn = _Attention(shape, 2 * size if joins else size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = SwiGLU(size, shape.intermediate_size)


class Eagle3Block(nn.Module):
    """The module. Its state dict is the published layout; the tables ``d2t`` and ``t2d`` are kept beside it."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.feature_size, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocabulary, bias=False)

    def initialise(self, seed: int = 0, std: float = 0.02, head: torch.Tensor | None = None) -> None:
        """Normal weights, unit norms, zero output projections.

        Args:
            head: (vocabulary, hidden) rows of the target's head to start from.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
                elif name.endswith(("bias", "o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
                else:
                    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
            if head is not None:
                self.lm_head.weight.copy_(head)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features (T, feature_size) -> g (T, hidden)."""
        out: torch.Tensor = self.fc(features)
        return out

    def joined(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention reads (T, 2 hidden), and what its output is added to (T, hidden), of rows x and g."""
        layer = self.midlayer
        normed: torch.Tensor = layer.hidden_norm(g)
        return torch.cat([layer.input_layernorm(x), normed], -1), normed if self.shape.norm_before_residual else g

    def _keys_values(self, n: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self.midlayer.self_attn
        return rotate(attention.split(attention.k_proj(n)), cos, sin), attention.split(attention.v_proj(n))

    def keys_values(
        self, x: torch.Tensor, g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (after RoPE) and values (Hkv, T, d) of rows: all that a prefill needs of the draft."""
        return self._keys_values(self.joined(x, g)[0], cos, sin)

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: SelfAttend,
        queries: slice | torch.Tensor = slice(None),
    ) -> torch.Tensor:
        """The module over T rows, up to the head.

        Args:
            x: (T, hidden) embeddings of the tokens that follow the rows' positions.
            g: (T, hidden): :meth:`project` of the features, or the draft's own previous output.
            cos, sin: (T, d) rotary embedding at the rows' positions.
            attend: attends among the rows, and to whatever cache it holds.
            queries: which rows go on beyond keys and values; all by default.

        Returns:
            (Tq, hidden): o, before the last norm; :meth:`logits` takes it, and so does the next step as its g.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        n, residual = self.joined(x, g)
        k, v = self._keys_values(n, cos, sin)
        n, residual, cos, sin = n[queries], residual[queries], cos[queries], sin[queries]
        q = rotate(attention.split(attention.q_proj(n)), cos, sin)
        attended = attend(q, k, v).transpose(0, 1).reshape(n.shape[0], -1)
        a = residual + attention.o_proj(attended)
        out: torch.Tensor = a + layer.mlp(layer.post_attention_layernorm(a))
        return out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """o (T, hidden) -> (T, vocabulary)."""
        logits: torch.Tensor = self.lm_head(self.norm(out))
        return logits
