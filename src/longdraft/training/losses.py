"""Fused linear layer and cross-entropy in chunks of rows: the logits of all rows are never in memory at once.

The forward pass computes the gradients of a chunk's input, and of the head if it is trained, as soon as it has the
logits. Only these gradients are kept for the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

LOGITS_CHUNK = 512


class TargetDistribution(NamedTuple):
    """The target's distribution over the draft's vocabulary: softmax(softcap(scale * state W^T)).

    Attributes:
        states: (M, hidden size) last hidden states, after the final norm. state_indices: (N,) the state of each row.
        head: (V, hidden size) rows of the target's head for the draft's vocabulary, in the dtype of matrix products.
        scale, softcap: logit scale and softcap of the target; None: no cap.
    """

    states: torch.Tensor
    state_indices: torch.Tensor
    head: torch.Tensor
    scale: float = 1.0
    softcap: float | None = None

    def probabilities(self, rows: slice, products: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Probabilities of some rows, in ``out`` (n, V) float32. ``products``: scratch in the head's dtype."""
        states = self.states[self.state_indices[rows]].to(self.head.dtype)
        z = out.copy_(torch.mm(states, self.head.T, out=products)).mul_(self.scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return torch.softmax(z, -1, out=z)


class _SoftCrossEntropy(torch.autograd.Function):
    """- sum over rows of  a log softmax(z)_label + b sum over k of p_k log softmax(z)_k  with logits z = h W^T.
    ``weights`` (N, 2) are a and b of each row, p is the target's distribution."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        target: TargetDistribution | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros(head.shape, device=head.device) if ctx.needs_input_grad[1] else None
        ranks = torch.empty(hidden.shape[0], dtype=torch.long, device=hidden.device)
        # Allocated once: on a CPU, allocating large memory takes as long as the computation.
        size = (min(chunk, hidden.shape[0]), head.shape[0])
        products = head.new_empty(size)
        logits, scratch = (torch.empty(size, device=head.device) for _ in range(2))
        chunk_grad = torch.empty_like(head) if grad_head is not None else None
        # Added in parts on a CPU, which would otherwise convert the whole matrix to float32 in new memory.
        part_rows = LOGITS_CHUNK if head.device.type == "cpu" else len(head)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            h = hidden[rows].to(head.dtype)
            (hard, soft), i, n = weights[rows].split(1, 1), labels[rows, None], len(h)
            z = logits[:n].copy_(torch.mm(h, head.T, out=products[:n]))
            # A tie or NaN counts as wrong. Compared as floats: a CPU sums booleans ten times slower.
            ranks[rows] = len(head) - 1 - torch.lt(z, z.gather(1, i), out=scratch[:n]).sum(-1).long()
            log_p = torch.log_softmax(z, -1, out=scratch[:n])
            loss -= (hard * log_p.gather(1, i)).sum()
            p = None if target is None else target.probabilities(rows, products[:n], z)
            if p is not None:
                loss -= (soft * torch.bmm(p[:, None], log_p[:, :, None])[:, 0]).sum()
            if grad_hidden is None and grad_head is None:
                continue
            g = log_p.exp_().mul_(hard + soft).scatter_add_(1, i, -hard)
            g = products[:n].copy_(g if p is None else g.sub_(p.mul_(soft)))
            if grad_hidden is not None:
                grad_hidden[rows] = g @ head
            if grad_head is not None and chunk_grad is not None:
                torch.mm(g.T, h, out=chunk_grad)
                for total, part in zip(grad_head.split(part_rows), chunk_grad.split(part_rows), strict=True):
                    total += part
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(ranks)
        return loss, ranks

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        factor = grads[0]
        return (
            None if grad_hidden is None else grad_hidden * factor.to(grad_hidden.dtype),
            None if grad_head is None else (grad_head * factor).to(ctx.head_dtype),
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
    """Cross-entropy against the text's tokens and the target's distribution, summed over rows.

    Args:
        hidden: (N, hidden size).
        head: (V, hidden size), frozen or trained, bfloat16 or float32: the dtype of matrix products. Log-sum-exp and
            sums are float32.
        labels: (N,) draft ids of the text's next tokens; -1 for a token that the draft's vocabulary lacks.
        weights: (N,), of the rows. distill: share of the loss against ``target``.

    Returns:
        The loss, a scalar, and (N,) the rank of each row's label: how many other ids have a logit at least as large.
    """
    if not torch.is_grad_enabled():  # forward() of the function cannot ask
        hidden, head = hidden.detach(), head.detach()
    row_weights = (torch.ones_like(labels) * weights).float()
    hard_soft = torch.stack([row_weights * (1 - distill) * (labels >= 0), row_weights * distill], 1)
    return _SoftCrossEntropy.apply(hidden, head, labels.clamp_min(0), hard_soft, target, chunk)
