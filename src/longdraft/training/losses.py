"""Fused linear + cross-entropy in chunks of rows, so that the whole logits are never in memory.

The forward pass turns the gradient of a chunk's logits into that of its input, and of the head if that is trained. Only
these are kept for the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

LOGITS_CHUNK = 512


class TargetDistribution(NamedTuple):
    """The target's distribution on the draft's vocabulary: softmax(capped(scale * state W^T)), renormalised there.

    Attributes:
        states: (M, hidden size) last hidden states, behind the final norm. rows: (N,) each row's among them.
        head: (V, hidden size) the target's rows for the draft's vocabulary, in the dtype of the draft's products.
        scale, softcap: of the target's own logits; None for no cap.
    """

    states: torch.Tensor
    rows: torch.Tensor
    head: torch.Tensor
    scale: float = 1.0
    softcap: float | None = None

    def probabilities(self, rows: slice, products: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Those of some rows, in ``out`` (n, V) float32; ``products`` has its shape and the head's dtype."""
        states = self.states[self.rows[rows]].to(self.head.dtype)
        z = out.copy_(torch.mm(states, self.head.T, out=products)).mul_(self.scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return torch.softmax(z, -1, out=z)


class _SoftCrossEntropy(torch.autograd.Function):
    """- sum over rows of  a log softmax(z)_token + b sum over k of p_k log softmax(z)_k  with  z = h W^T."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        target: TargetDistribution | None,
        chunk: int,
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
        piece = LOGITS_CHUNK if head.device.type == "cpu" else len(head)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            h = hidden[rows].to(head.dtype)
            (hard, soft), i, n = weights[rows].split(1, 1), tokens[rows, None], len(h)
            z = wide[:n].copy_(torch.mm(h, head.T, out=products[:n]))
            # Ties are wrong, and so is what is no number. As numbers, because a CPU sums booleans ten times slower.
            ranks[rows] = len(head) - 1 - torch.lt(z, z.gather(1, i), out=other[:n]).sum(-1).long()
            log_p = torch.log_softmax(z, -1, out=other[:n])
            total -= (hard * log_p.gather(1, i)).sum()
            p = None if target is None else target.probabilities(rows, products[:n], z)
            if p is not None:
                total -= (soft * torch.bmm(p[:, None], log_p[:, :, None])[:, 0]).sum()
            if gradient is None and trained is None:
                continue
            g = log_p.exp_().mul_(hard + soft).scatter_add_(1, i, -hard)
            g = products[:n].copy_(g if p is None else g.sub_(p.mul_(soft)))
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
            *[None] * 4,
        )


def soft_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | float = 1.0,
    target: TargetDistribution | None = None,
    distill: float = 0.0,
    chunk: int = LOGITS_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of the head's softmax against the text's tokens and the target's distribution, summed over rows.

    Args:
        hidden: (N, hidden size).
        head: (V, hidden size), frozen or trained. Its dtype is that of the matrix products, bfloat16 or float32;
            log-sum-exp and sums are float32.
        labels: (N,) next tokens of the text, as draft ids; -1 where the draft's vocabulary lacks the token.
        weights: of the rows, (N,).
        target: its distribution. distill: share of the loss that follows it; 0 is plain cross-entropy.

    Returns:
        The loss, a scalar, and (N,) the rank of each row's token: how many other ids have no smaller logits.
    """
    if not torch.is_grad_enabled():  # unknown inside the function
        hidden, head = hidden.detach(), head.detach()
    each = (torch.ones_like(labels) * weights).float()
    shares = torch.stack([each * (1 - distill) * (labels >= 0), each * distill], 1)
    return _SoftCrossEntropy.apply(hidden, head, labels.clamp_min(0), shares, target, chunk)
