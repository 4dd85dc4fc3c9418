"""The module of DFlash, DFlash2 and DSpark; :mod:`longdraft.drafters.dflash` has the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from longdraft.attention.sdpa import one_text
from longdraft.drafters.shared.layers import Attention, SwiGLU
from longdraft.drafts.dflash_formats import DFlashShape


class Convolution(nn.Module):
    """DFlash2's convolutions before and after a part of a layer, over the rows of a block: each row sees itself and
    the rows before it, with kernels that the row itself chooses, one for each group of channels."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size, dtype=torch.float32))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def kernels(self, x: torch.Tensor) -> torch.Tensor:
        """Rows (B, S, size) -> kernels (2, taps, B, S, size), of the convolution before and of the one after."""
        _, taps, size = self.base_kernel.shape
        own = self.kernel_projection(x).unflatten(-1, (2, taps, size // self.group))
        own = own.repeat_interleave(self.group, -1).movedim((-3, -2), (0, 1))
        return own + self.base_kernel[:, :, None, None]

    @staticmethod
    def over(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """Convolves rows (B, S, size) with kernels (taps, B, S, size)."""
        taps, rows = len(kernels), x.shape[1]
        return sum((F.pad(x, (0, 0, i, 0))[:, :rows] * kernels[i] for i in range(taps)), torch.zeros_like(x))


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        heads = shape.heads, shape.kv_heads, shape.head_dim
        self.self_attn = Attention(size, size, *heads, shape.attention_bias, shape.attention_bias, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = SwiGLU(size, shape.intermediate_size)
        if shape.taps is not None and shape.group is not None:
            self.attention_conv = Convolution(size, shape.taps, shape.group)
            self.mlp_conv = Convolution(size, shape.taps, shape.group)
        self.convolves = shape.taps is not None


class MarkovHead(nn.Module):
    """DSpark's correction of a level's logits for the token before."""

    def __init__(self, shape: DFlashShape, rank: int, tokens: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, shape.vocabulary, bias=False)
        if shape.gated:
            self.gate_proj = nn.Linear(shape.hidden_size + rank, rank)
        elif shape.recurrent:
            self.joint_proj = nn.Linear(2 * rank + shape.hidden_size, 3 * rank)


class Selector(nn.Module):
    """DFlash2's correction: which of the likeliest tokens follows the token before."""

    def __init__(self, shape: DFlashShape, rank: int, tokens: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(tokens, rank, dtype=torch.float32))
        self.successor_codebook = nn.Parameter(torch.zeros(shape.vocabulary, rank, dtype=torch.float32))
        self.hidden_projection = nn.Linear(shape.hidden_size, rank, bias=False)


class DFlashBlock(nn.Module):
    """The module. Its state dict is the published layout.

    Args:
        tokens: the target's vocabulary.
        causal: for each layer, whether the rows of a block see only those before them.
        windows: for each layer, rows of the text that it sees; None: all.
    """

    def __init__(self, shape: DFlashShape, tokens: int, causal: list[bool], windows: list[int | None]) -> None:
        super().__init__()
        self.shape, self.causal, self.windows = shape, causal, windows
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(shape.feature_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.decoder_layers))
        self.norm = nn.RMSNorm(size, eps)
        if shape.own_head:
            self.lm_head = nn.Linear(size, shape.vocabulary, bias=False)
        if shape.embedding is not None:
            self.embed_tokens = nn.Embedding(shape.embedding, size)
        if shape.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(size, dtype=torch.float32))
        if shape.markov_rank is not None:
            self.markov_head = MarkovHead(shape, shape.markov_rank, tokens)
        if shape.selector_rank is not None:
            self.candidate_selector = Selector(shape, shape.selector_rank, tokens)

    def borrow(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Borrows the target's head, (T, hidden) -> (T, vocabulary), for a draft without one of its own."""
        self._head = head

    @property
    def _decoder(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features (T, feature_size) -> c (T, hidden)."""
        out: torch.Tensor = self.hidden_norm(self.fc(features))
        return out

    def keys_values(
        self, x: torch.Tensor, g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (after RoPE) and values (layers, Hkv, T, d) of rows c (T, hidden) of the text, which ``g`` holds."""
        each = [layer.self_attn.keys_values(g, cos, sin) for layer in self._decoder]
        return torch.stack([k for k, _ in each]), torch.stack([v for _, v in each])

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        texts: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Blocks (B, S, hidden) of embeddings -> their rows behind the last norm (B, S, hidden).

        Args:
            cos, sin: (B * S, d) rotary embedding at the rows' positions.
            texts: each sequence's keys and values (layers, Hkv, n, d) of its text, as :meth:`keys_values` gives them.
        """
        for i, layer in enumerate(self._decoder):
            n = layer.input_layernorm(x)
            if layer.convolves:
                before, after = layer.attention_conv.kernels(n)
                n = layer.attention_conv.over(n, before)
            out = self._attended(i, n, cos, sin, texts)
            x = x + (layer.attention_conv.over(out, after) if layer.convolves else out)
            n = layer.post_attention_layernorm(x)
            if layer.convolves:
                before, after = layer.mlp_conv.kernels(n)
                x = x + layer.mlp_conv.over(layer.mlp(layer.mlp_conv.over(n, before)), after)
            else:
                x = x + layer.mlp(n)
        found: torch.Tensor = self.norm(x)
        return found

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Rows (T, hidden) behind the last norm -> (T, vocabulary)."""
        shape = self.shape
        logits: torch.Tensor = (self.lm_head if shape.own_head else self._head)(out) * shape.logit_scale
        return logits if shape.softcap is None else torch.tanh(logits / shape.softcap) * shape.softcap

    def _attended(
        self,
        index: int,
        n: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        texts: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        attention, rows = self._decoder[index].self_attn, n.shape[1]
        flat = n.flatten(0, 1)
        # In the order in which the products of the same rows are computed together.
        q = attention.queries(flat, cos, sin).split(rows, 1)
        own = [t.split(rows, 1) for t in attention.keys_values(flat, cos, sin)]
        seen, window = self._seen(index, rows, n.device), self.windows[index]
        outputs = []
        for i, text in enumerate(texts):
            first = 0 if window is None else max(0, text[0].shape[2] - window)
            k, v = (torch.cat([t[index, :, first:], own[j][i]], 1) for j, t in enumerate(text))
            mask = None if seen is None else F.pad(seen, (k.shape[1] - rows, 0), value=True)
            outputs.append(one_text(q[i], k, v, mask).transpose(0, 1).flatten(1))
        out: torch.Tensor = attention.o_proj(torch.stack(outputs))
        return out

    def _seen(self, index: int, rows: int, device: torch.device) -> torch.Tensor | None:
        """(S, S) bool: the rows of the block that each of its rows sees; None: all."""
        return torch.ones(rows, rows, dtype=torch.bool, device=device).tril() if self.causal[index] else None
