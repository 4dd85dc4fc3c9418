"""Fused linear + cross-entropy, in chunks: the whole logits are never in memory.

The head is the target's and is not trained, so the gradient of a chunk's logits is turned into the gradient of its
input at once, and nothing but that is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 512


class _SoftCrossEntropy(torch.autograd.Function):
    """sum over rows of  m lse(z) - sum_k w_k z_{id_k}  with  z = h W^T  and  m = sum_k w_k."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        ranks = torch.empty(hidden.shape[0], dtype=torch.long, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            z = (hidden[rows].to(head.dtype) @ head.T).float()
            w, i = weights[rows], ids[rows]
            mass = w.sum(-1, keepdim=True)
            lse = torch.logsumexp(z, -1, keepdim=True)
            total += (mass * lse).sum() - (w * z.gather(1, i)).sum()
            ranks[rows] = (z > z.gather(1, i[:, :1])).sum(-1)
            g = z.sub_(lse).exp_().mul_(mass).scatter_add_(1, i, -w)
            gradient[rows] = (g.to(head.dtype) @ head).to(hidden.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ranks)
        return total, ranks

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None


def soft_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of the head's softmax against sparse targets, summed over rows.

    Args:
        hidden: (N, hidden size).
        head: (V, hidden size), frozen; its dtype is the matrix products' (bfloat16 or float32). Log-sum-exp and
            sums are float32.
        ids: (N, K) target ids; an id may come twice in a row.
        weights: (N, K) float32, the targets' weights; 0 leaves an entry out, a row of zeros leaves the row out.

    Returns:
        The loss, a scalar, and (N,) the rank of each row's first target: how many ids have larger logits.
    """
    return _SoftCrossEntropy.apply(hidden, head, ids, weights, chunk)


def targets(
    tokens: torch.Tensor, top_ids: torch.Tensor, top_log_probs: torch.Tensor, distill: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixes the data's tokens with the target's own distribution.

    Args:
        tokens: (N,) next tokens of the text, as draft ids; -1 where the draft's vocabulary has none.
        top_ids: (N, K) the target's likeliest tokens, as draft ids, -1 likewise; top_log_probs: (N, K).
        distill: share of the loss that follows the target's distribution; 0 is plain cross-entropy (the paper).

    Returns:
        ids and weights for :func:`soft_cross_entropy`. A row's weights sum to 1, or to 0 where nothing is in the
        vocabulary.
    """
    hard = (tokens >= 0).float()[:, None] * (1 - distill)
    soft = top_log_probs.float().exp() * (top_ids >= 0)
    soft = distill * soft / soft.sum(-1, keepdim=True).clamp_min(1e-6)
    return torch.cat([tokens[:, None], top_ids], 1).clamp_min(0), torch.cat([hard, soft], 1)
