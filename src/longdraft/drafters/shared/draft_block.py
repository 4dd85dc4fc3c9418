"""The decoder block of a draft with a KV cache of its own, as in LongSpec, EAGLE and P-EAGLE.

    n, h = combine_inputs(x, g)     x: token embeddings; g: features of the target (EAGLE), or None
    h = h + SelfAttn(n)             n: attention input, after norms; h: residual
    h = h + CrossAttn(RMSNorm(h))   LongSpec only: to the target's keys and values
    h = h + SwiGLU(RMSNorm(h))
    logits = head(RMSNorm(h))

Each drafter's file defines ``combine_inputs``, and the modules before and after these layers. Shapes: T tokens of a
forward, of which Tq have outputs; Hq query heads and Hkv KV heads, of size d.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from longdraft.native.boundary import CPU_FLOAT32

# (q (Hq, Tq, d), k and v (Hkv, T, d)) -> output (Hq, Tq, d); k and v are those of the forward's tokens. After RoPE.
SelfAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# q (Hq, Tq, d) -> output (Hq, Tq, d); attends to the target's keys and values.
CrossAttend = Callable[[torch.Tensor], torch.Tensor]
OutputRows = slice | torch.Tensor  # indices of the tokens of a forward whose outputs are computed
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


class DraftAttention(nn.Module):
    """Projections and RoPE of an attention layer. The caller passes a function that computes the attention.

    Args:
        shape: sizes of the block.
        size: size of the attention input of one token.
        has_kv: True: project keys and values too. False for cross-attention, which reads the target's.
    """

    def __init__(self, shape: Any, size: int, has_kv: bool = True) -> None:
        super().__init__()
        self.head_dim, bias, eps = shape.head_dim, shape.attention_bias, shape.rms_norm_eps
        self.q_proj = nn.Linear(size, shape.heads * shape.head_dim, bias=bias)
        if has_kv:
            self.k_proj = nn.Linear(size, shape.kv_heads * shape.head_dim, bias=bias)
            self.v_proj = nn.Linear(size, shape.kv_heads * shape.head_dim, bias=bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=shape.output_bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps) if shape.qk_norm else nn.Identity() for _ in "qk")

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Converts (T, heads * d) to (heads, T, d)."""
        return x.view(x.shape[0], -1, self.head_dim).transpose(0, 1)

    def merge_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Converts (heads, T, d) to (T, hidden), by the output projection."""
        out: torch.Tensor = self.o_proj(x.transpose(0, 1).reshape(x.shape[1], -1))
        return out

    def queries(self, n: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Returns queries (Hq, T, d) after RoPE. ``cos``, ``sin``: (T, d) at the tokens' positions."""
        return rotate(self.q_norm(self.split_heads(self.q_proj(n))), cos, sin)

    def keys_values(self, n: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys after RoPE and values, both (Hkv, T, d)."""
        return rotate(self.k_norm(self.split_heads(self.k_proj(n))), cos, sin), self.split_heads(self.v_proj(n))

    def forward(
        self, n: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: SelfAttend, output_rows: OutputRows = ALL
    ) -> torch.Tensor:
        """Returns the outputs (Tq, hidden) of ``output_rows``. Keys and values are computed for all T tokens."""
        keys, values = self.keys_values(n, cos, sin)
        return self.merge_heads(attend(self.queries(n[output_rows], cos[output_rows], sin[output_rows]), keys, values))


class DraftLayer(nn.Module):
    """A decoder layer. The attention input comes from :meth:`DraftBlock.combine_inputs`, which each drafter defines.

    Args:
        shape: sizes of the block.
        size: size of the attention input of one token.
        norms: attribute names of the RMSNorms before self-attention.
        cross: True: the layer also has cross-attention to the target's keys and values.
    """

    input_layernorm: nn.RMSNorm
    hidden_norm: nn.RMSNorm
    post_attention_layernorm: nn.RMSNorm
    post_cross_attention_layernorm: nn.RMSNorm

    def __init__(self, shape: Any, size: int, *norms: str, cross: bool = False) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        for name in norms:
            self.add_module(name, nn.RMSNorm(hidden, eps))
        self.self_attn = DraftAttention(shape, size)
        self.cross_attn: DraftAttention | None = None
        if cross:
            self.post_self_attention_layernorm = nn.RMSNorm(hidden, eps)
            self.cross_attn = DraftAttention(shape, hidden, has_kv=False)
        self.add_module(f"post_{'cross_' if cross else ''}attention_layernorm", nn.RMSNorm(hidden, eps))
        self.mlp = SwiGLU(hidden, shape.intermediate_size)

    @property
    def mlp_norm(self) -> nn.RMSNorm:  # the norm before the MLP, by its name in published layouts
        return self.post_attention_layernorm if self.cross_attn is None else self.post_cross_attention_layernorm

    def run_layer(
        self,
        n: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: SelfAttend,
        output_rows: OutputRows = ALL,
        cross: CrossAttend | None = None,
    ) -> torch.Tensor:
        """Converts the attention input n (T, size) and the residual (T, hidden) to outputs (Tq, hidden)."""
        h = residual[output_rows] + self.self_attn(n, cos, sin, attend, output_rows)
        if self.cross_attn is not None and cross is not None:
            q = self.cross_attn.queries(self.post_self_attention_layernorm(h), cos[output_rows], sin[output_rows])
            h = h + self.cross_attn.merge_heads(cross(q))
        out: torch.Tensor = h + self.mlp(self.mlp_norm(h))
        return out


class DraftBlock(nn.Module):
    """Base of blocks. A subclass defines :meth:`combine_inputs`, and sets ``shape`` and ``norm``, before the head."""

    shape: Any
    norm: nn.Module
    has_fused_kernel = False  # True if our CPU kernels can compute the block
    reads_tokens = True  # False if keys and values of the context depend on the target's hidden states alone
    later_layers: tuple[DraftLayer, ...] = ()  # the layers after the first

    @property
    def first_layer(self) -> DraftLayer:
        """The first layer, usually the only one."""
        raise NotImplementedError

    @abstractmethod
    def combine_inputs(self, x: torch.Tensor, g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Converts x and g (T, hidden) to the first layer's attention input (T, size) and residual (T, hidden)."""

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """Converts the target's features (T, feature_size) to g (T, hidden)."""
        raise NotImplementedError

    def next_features(self, out: torch.Tensor) -> torch.Tensor:
        """Converts outputs (T, hidden) of nodes to g (T, hidden) of the nodes' children."""
        return out

    def keys_values(
        self, x: torch.Tensor, g: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys after RoPE and values (1, Hkv, T, d). The prefill of a one-layer draft computes nothing else."""
        k, v = self.first_layer.self_attn.keys_values(self.combine_inputs(x, g)[0], cos, sin)
        return k[None], v[None]

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend_fns: SequenceOf[SelfAttend],
        output_rows: OutputRows = ALL,
        cross: CrossAttend | None = None,
    ) -> torch.Tensor:
        """Runs the layers on T tokens.

        Args:
            x: (T, hidden) token embeddings.
            g: (T, hidden) from :meth:`project_features` or, for nodes of a tree, from :meth:`next_features`.
            cos, sin: (T, d) rotary embedding at the tokens' positions.
            attend_fns: self-attention of each layer, to the layer's cache and among the tokens.
            output_rows: tokens whose outputs are computed. Keys and values are computed for all tokens.
            cross: cross-attention to the target's keys and values; None if the block has no cross-attention.

        Returns:
            Outputs (Tq, hidden) before the final norm.
        """
        later_layers = list(zip(self.later_layers, attend_fns[1:], strict=True))
        first_rows = ALL if later_layers else output_rows  # later layers compute keys from the outputs of all tokens
        out = self.first_layer.run_layer(*self.combine_inputs(x, g), cos, sin, attend_fns[0], first_rows, cross)
        for layer, attend in later_layers:
            out = layer.run_layer(layer.input_layernorm(out), out, cos, sin, attend)
        return out[output_rows] if later_layers else out

    def borrow_head(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Sets the target's head, (T, hidden) -> (T, vocabulary), as a function, which stays out of the state dict."""
        self.head = head

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Converts outputs (T, hidden) to logits (T, vocabulary)."""
        return self.head(self.norm(out))

    def initialize(self, seed: int = 0, std: float = 0.02) -> None:
        """Draws the weights of a new block; see :func:`initialize_weights`."""
        initialize_weights(self, seed, std)


def initialize_weights(module: nn.Module, seed: int = 0, std: float = 0.02) -> None:
    """Draws normal weights. Sets norms to 1, biases and output projections to 0: layers start as the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(("bias", "o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            else:
                parameter.copy_(torch.empty(parameter.shape, **CPU_FLOAT32).normal_(0.0, std, generator=generator))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies RoPE in the half-split convention. ``x``: (heads, T, d). ``cos``, ``sin``: (T, d), of any dtype."""
    first_half, second_half = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second_half, first_half), dim=-1) * sin.to(x.dtype)
