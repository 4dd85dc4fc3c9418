"""The modules of DFlash 2 that DFlash lacks: convolutions over the tokens of a block, and a selector of candidates.

    n' = conv(n, K_0)   around attention and MLP: ``part`` of a layer becomes conv(part(conv(n, K_0)), K_1), with
                        K_i = base_i + P_i n for each token's own n, one kernel for each group of channels
    score_k(b | a) = logits_k(b) + <A[a] * (H x_k), B[b]>     for the most likely tokens b of a level, after the token a

A convolution of ``taps`` taps reads a token and the ``taps - 1`` tokens before it in its block. Shapes: N tokens of
blocks of S tokens, W nodes of a level, M candidates of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from longdraft.drafters.shared.draft_block import DraftLayer, SelfAttend
from longdraft.drafts.dflash_formats import DFlashShape


class DynamicConvolution(nn.Module):
    """The two convolutions around a part of a layer, whose kernels depend on the tokens.

    Args:
        size: number of channels. ``group_size``: channels that share a token's kernel. ``taps``: length of a kernel.
    """

    def __init__(self, size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size, dtype=torch.float32))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group_size), bias=False)

    def around(self, part: Callable[[torch.Tensor], torch.Tensor], n: torch.Tensor, block_size: int) -> torch.Tensor:
        """Returns conv(part(conv(n))) for the normalised inputs n (N, size) of whole blocks."""
        _, taps, size = self.base_kernel.shape
        by_group = self.kernel_projection(n).unflatten(-1, (2, taps, size // self.group_size))
        kernels = by_group.repeat_interleave(self.group_size, -1) + self.base_kernel  # (N, 2, taps, size)
        inner = _convolve(n, kernels[:, 0], block_size)
        return _convolve(part(inner), kernels[:, 1], block_size)


def _convolve(x: torch.Tensor, kernels: torch.Tensor, block_size: int) -> torch.Tensor:
    """Convolves x (N, size) with each token's kernel (N, taps, size). Before a block there are zeros."""
    blocks = x.unflatten(0, (-1, block_size))
    padded = F.pad(blocks, (0, 0, kernels.shape[1] - 1, 0))
    shifted = padded.unfold(1, kernels.shape[1], 1).flip(-1).flatten(0, 1)  # (N, size, taps), the token itself first
    return (shifted * kernels.mT).sum(-1)


class DFlash2Layer(DraftLayer):
    """A decoder layer with a convolution around attention, and one around the MLP."""

    def __init__(self, shape: DFlashShape, taps: int, group_size: int) -> None:
        super().__init__(shape, shape.hidden_size, "input_layernorm")
        self.block_size = shape.block_size
        self.attention_conv = DynamicConvolution(shape.hidden_size, taps, group_size)
        self.mlp_conv = DynamicConvolution(shape.hidden_size, taps, group_size)

    def run_layer(
        self, n: torch.Tensor, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: SelfAttend,
        *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        attention = partial(self.self_attn, cos=cos, sin=sin, attend=attend)
        h = residual + self.attention_conv.around(attention, n, self.block_size)
        return h + self.mlp_conv.around(self.mlp, self.mlp_norm(h), self.block_size)


class CandidateSelector(nn.Module):
    """Parameters of the selector: A, B (vocabulary, rank) and H."""

    def __init__(self, shape: DFlashShape, rank: int, vocab_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank, dtype=torch.float32))
        self.successor_codebook = nn.Parameter(torch.zeros(shape.vocabulary, rank, dtype=torch.float32))
        self.hidden_projection = nn.Linear(shape.hidden_size, rank, bias=False)

    def correction(self, tokens: torch.Tensor, x: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Returns what candidates (B, M) gain after tokens (B, W) by the outputs x (B, 1, hidden): (B, W, M)."""
        predecessors = self.predecessor_codebook[tokens] * self.hidden_projection(x)
        return (predecessors @ self.successor_codebook[candidates].mT).float()
