"""The block of EAGLE-3 and its kin: one decoder layer behind what is read of the target, or several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from longdraft.drafters.shared.layers import SelfAttend, SwiGLU, rotate
from longdraft.drafts.eagle_formats import Eagle3Shape
from longdraft.native.boundary import FLOATS


class _Attention(nn.Module):
    def __init__(self, shape: Eagle3Shape, size: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        inner, kv, bias = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.attention_bias
        self.q_proj = nn.Linear(size, inner, bias=bias)
        self.k_proj = nn.Linear(size, kv, bias=bias)
        self.v_proj = nn.Linear(size, kv, bias=bias)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=shape.output_bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else nn.Identity() for _ in "qk"
        )

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(T, heads * d) -> (heads, T, d)."""
        return x.view(x.shape[0], -1, self.head_dim).transpose(0, 1)


class Layer(nn.Module):
    """The decoder layer.

    Args:
        joins: the attention reads x and g side by side, each normalised by its own norm; else one vector, as it is.
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


class DeeperLayer(Layer):
    """A layer behind the first one: it reads the output of the layer before, normed."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape, joins=False)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: SelfAttend) -> torch.Tensor:
        """Rows (T, hidden) -> (T, hidden). Arguments as of :meth:`Eagle3Block.forward`."""
        own, n = self.self_attn, self.input_layernorm(x)
        q, k = (
            rotate(norm(own.split(part(n))), cos, sin)
            for norm, part in ((own.q_norm, own.q_proj), (own.k_norm, own.k_proj))
        )
        a = x + own.o_proj(attend(q, k, own.split(own.v_proj(n))).transpose(0, 1).flatten(1))
        out: torch.Tensor = a + self.mlp(self.post_attention_layernorm(a))
        return out


class Eagle3Block(nn.Module):
    """The module. Its state dict is the published layout; the tables ``d2t`` and ``t2d`` are kept beside it."""

    norm_output = False

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape, self.norm_output = shape, shape.norm_output
        eps, size = shape.rms_norm_eps, shape.feature_size
        if shape.norm_before_fc:
            self.input_norm = nn.RMSNorm(size, eps)
        if shape.fc_norm is not None:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(size // shape.fc_norm, eps) for _ in range(shape.fc_norm))
        if shape.embedding is not None:
            self.embed_tokens = nn.Embedding(shape.embedding, shape.hidden_size)
        self.fc = nn.Linear(size, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        if shape.decoder_layers > 1:
            self.layers = nn.ModuleDict({str(i): DeeperLayer(shape) for i in range(1, shape.decoder_layers)})
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
                    parameter.copy_(torch.empty(parameter.shape, **FLOATS).normal_(0.0, std, generator=generator))
            if head is not None:
                self.lm_head.weight.copy_(head)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features (T, feature_size) -> g (T, hidden)."""
        if self.shape.norm_before_fc:
            features = self.input_norm(features)
        if self.shape.fc_norm is not None:
            parts = features.chunk(self.shape.fc_norm, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: torch.Tensor = self.fc(features)
        return out

    def following(self, out: torch.Tensor) -> torch.Tensor:
        """The output o (T, hidden) of a step -> the next step's g (T, hidden)."""
        if not self.norm_output:
            return out
        normed: torch.Tensor = self.norm(out)
        return normed

    def joined(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention's input (T, 2 hidden), and the residual (T, hidden), of rows x and g."""
        layer = self.midlayer
        normed: torch.Tensor = layer.hidden_norm(g)
        return torch.cat([layer.input_layernorm(x), normed], -1), normed if self.shape.norm_before_residual else g

    def _keys_values(self, n: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self.midlayer.self_attn
        k = attention.k_norm(attention.split(attention.k_proj(n)))
        return rotate(k, cos, sin), attention.split(attention.v_proj(n))

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
        """The first layer over T rows, usually the only one.

        Args:
            x: (T, hidden) embeddings of the tokens that follow the rows' positions.
            g: (T, hidden): :meth:`project` of the features, or the draft's own previous output.
            cos, sin: (T, d) rotary embedding at the rows' positions.
            attend: attends among the rows, and to the cache that it holds.
            queries: the rows to compute an output for; by default all. Keys and values are computed for every row.

        Returns:
            (Tq, hidden): o, before the last norm: the input of :meth:`logits` and of :meth:`following`.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        n, residual = self.joined(x, g)
        k, v = self._keys_values(n, cos, sin)
        n, residual, cos, sin = n[queries], residual[queries], cos[queries], sin[queries]
        q = rotate(attention.q_norm(attention.split(attention.q_proj(n))), cos, sin)
        attended = attend(q, k, v).transpose(0, 1).reshape(n.shape[0], -1)
        a = residual + attention.o_proj(attended)
        out: torch.Tensor = a + layer.mlp(layer.post_attention_layernorm(a))
        return out

    def through(
        self, x: torch.Tensor, g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attends: Sequence[SelfAttend]
    ) -> torch.Tensor:
        """All rows through all layers, each with its own attention: :meth:`forward` is the first layer alone."""
        out: torch.Tensor = self(x, g, cos, sin, attends[0])
        for layer, attend in zip(self.layers.values(), attends[1:], strict=True):
            out = layer(out, cos, sin, attend)
        return out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """o (T, hidden) -> (T, vocabulary)."""
        logits: torch.Tensor = self.lm_head(self.norm(out))
        return logits
