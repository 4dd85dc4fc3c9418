"""Fused linear + cross-entropy in chunks of rows, so that the whole logits are never in memory.

The forward pass turns the gradient of a chunk's logits into that of its input, and of the head if that is trained. Only
these are kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

CHUNK = 512


class _SoftCrossEntropy(torch.autograd.Function):
    """- sum over rows and k of  w_k log softmax(z)_{id_k}  with  z = h W^T."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        trained = torch.zeros(head.shape, device=head.device) if ctx.needs_input_grad[1] else None
        ranks = torch.empty(hidden.shape[0], dtype=torch.long, device=hidden.device)
        # Allocated once: a CPU takes as long to get large memory as to compute with it.
        size = (min(chunk, hidden.shape[0]), head.shape[0])
        products = head.new_empty(size)
        wide, other = (torch.empty(size, device=head.device) for _ in range(2))
        of_head = torch.empty_like(head) if trained is not None else None
        # A CPU would convert all of it first, in memory of its own.
        piece = CHUNK if head.device.type == "cpu" and not isinstance(head, FakeTensor) else len(head)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            h = hidden[rows].to(head.dtype)
            w, i, n = weights[rows], ids[rows], len(h)
            z = wide[:n].copy_(torch.mm(h, head.T, out=products[:n]))
            # As numbers, because a CPU sums booleans ten times slower.
            ranks[rows] = torch.gt(z, z.gather(1, i[:, :1]), out=other[:n]).sum(-1).long()
            log_p = torch.log_softmax(z, -1, out=other[:n])
            total -= (w * log_p.gather(1, i)).sum()
            if gradient is None and trained is None:
                continue
            g = products[:n].copy_(log_p.exp_().mul_(w.sum(-1, keepdim=True)).scatter_add_(1, i, -w))
            if gradient is not None:
                gradient[rows] = g @ head
            if trained is not None and of_head is not None:
                torch.mm(g.T, h, out=of_head)
                for sum_, part in zip(trained.split(piece), of_head.split(piece), strict=True):
                    sum_ += part
        ctx.save_for_backward(gradient, trained)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(ranks)
        return total, ranks

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, trained = ctx.saved_tensors
        factor = grads[0]
        return (
            None if gradient is None else gradient * factor.to(gradient.dtype),
            None if trained is None else (trained * factor).to(ctx.head_dtype),
            None,
            None,
            None,
        )


def soft_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of the head's softmax against sparse targets, summed over rows.

    Args:
        hidden: (N, hidden size).
        head: (V, hidden size), frozen or trained. Its dtype is that of the matrix products, bfloat16 or float32;
            log-sum-exp and sums are float32.
        ids: (N, K) target ids; a row may have an id twice.
        weights: (N, K) float32, the targets' weights.

    Returns:
        The loss, a scalar, and (N,) the rank of each row's first target: how many ids have larger logits.
    """
    if not torch.is_grad_enabled():  # unknown inside the function
        hidden, head = hidden.detach(), head.detach()
    return _SoftCrossEntropy.apply(hidden, head, ids, weights, chunk)


def targets(
    tokens: torch.Tensor, top_ids: torch.Tensor, top_log_probs: torch.Tensor, distill: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixes the text's tokens with the target's distribution.

    Args:
        tokens: (N,) next tokens of the text, as draft ids; -1 where the draft's vocabulary lacks the token.
        top_ids: (N, K) the target's likeliest tokens, likewise. top_log_probs: (N, K).
        distill: share of the loss that follows the target's distribution; 0 is plain cross-entropy.

    Returns:
        ids and weights for :func:`soft_cross_entropy`. A token that the vocabulary lacks has weight 0.
    """
    hard = (tokens >= 0).float()[:, None] * (1 - distill)
    soft = top_log_probs.float().exp() * (top_ids >= 0)
    soft = distill * soft / soft.sum(-1, keepdim=True).clamp_min(1e-6)
    return torch.cat([tokens[:, None], top_ids], 1).clamp_min(0), torch.cat([hard, soft], 1)
