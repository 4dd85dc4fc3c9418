"""The block of EAGLE-3 and its kin: one decoder layer behind what is read of the target, or several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from longdraft.drafters.shared.layers import ALL, Attention, Going, SelfAttend, SwiGLU, initialise
from longdraft.drafts.eagle_formats import Eagle3Shape


class Layer(nn.Module):
    """A decoder layer, whose input the block norms and joins.

    Args:
        size: of the attention's input.
        norms: names of the norms before it.
    """

    input_layernorm: nn.RMSNorm
    hidden_norm: nn.RMSNorm

    def __init__(self, shape: Eagle3Shape, size: int, *norms: str) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        for name in norms:
            self.add_module(name, nn.RMSNorm(hidden, eps))
        heads = shape.heads, shape.kv_heads, shape.head_dim
        norm = eps if shape.qk_norm else None
        self.self_attn = Attention(size, hidden, *heads, shape.attention_bias, shape.output_bias, norm)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, shape.intermediate_size)

    def forward(
        self,
        n: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: SelfAttend,
        queries: Going = ALL,
    ) -> torch.Tensor:
        """The attention's input (T, size) and the residual (T, hidden) -> (Tq, hidden)."""
        a = residual[queries] + self.self_attn(n, cos, sin, attend, queries)
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
        hidden, further = shape.hidden_size, range(1, shape.decoder_layers)
        self.midlayer = Layer(shape, 2 * hidden, "input_layernorm", "hidden_norm")
        if further:
            self.layers = nn.ModuleDict({str(i): Layer(shape, hidden, "input_layernorm") for i in further})
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocabulary, bias=False)

    def initialise(self, seed: int = 0, std: float = 0.02, head: torch.Tensor | None = None) -> None:
        """Normal weights, unit norms, zero output projections.

        Args:
            head: (vocabulary, hidden) rows of the target's head to start from.
        """
        initialise(self, seed, std)
        if head is not None:
            with torch.no_grad():
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

    def keys_values(
        self, x: torch.Tensor, g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (after RoPE) and values (Hkv, T, d) of rows: all that a prefill needs of the draft."""
        return self.midlayer.self_attn.keys_values(self.joined(x, g)[0], cos, sin)

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: SelfAttend,
        queries: Going = ALL,
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
        out: torch.Tensor = self.midlayer(*self.joined(x, g), cos, sin, attend, queries)
        return out

    def through(
        self, x: torch.Tensor, g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attends: Sequence[SelfAttend]
    ) -> torch.Tensor:
        """All rows through all layers, each with its own attention: :meth:`forward` is the first layer alone."""
        out: torch.Tensor = self(x, g, cos, sin, attends[0])
        for layer, attend in zip(self.layers.values(), attends[1:], strict=True):
            assert isinstance(layer, Layer)
            out = layer(layer.input_layernorm(out), out, cos, sin, attend)
        return out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """o (T, hidden) -> (T, vocabulary)."""
        logits: torch.Tensor = self.lm_head(self.norm(out))
        return logits
