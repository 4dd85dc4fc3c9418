"""Fused linear layer and cross-entropy in chunks of tokens: the logits of all tokens are never in memory at once.

With a chunk's logits, the forward pass also computes the gradients of the chunk's hidden states, and of the head if the
head is trained. The backward pass only needs these gradients (as in Liger-Kernel).

Shapes: N tokens; W ids in the draft's vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

LOGITS_CHUNK = 512  # tokens whose logits are in memory at once


@torch.no_grad()
def scale_logits(norm: torch.nn.Module, head: torch.Tensor) -> None:
    """Scales a new norm before a head (W, hidden size) so that logits are about 1 in size. With the target's head and a
    norm that does not scale, a new draft would be confident and wrong for a hundred steps."""
    factor = 1 / float(head.float().norm(dim=-1).median().clamp_min(1e-6))
    norm.get_parameter("weight").add_(factor - 1)  # a weight is the factor, or the factor minus 1


class TargetDistribution(NamedTuple):
    """The target's distribution over the draft's vocabulary: softmax(softcap(scale * state @ head.T))."""

    states: torch.Tensor  # (number of states, hidden size) last hidden states, after the final norm
    state_indices: torch.Tensor  # (N,) for each label, the row of its state
    head: torch.Tensor  # (W, hidden size) rows of the target's head for the draft's vocabulary, in the products' dtype
    scale: float = 1.0  # factor of the target's logits
    softcap: float | None = None  # soft cap of the target's logits; None: no cap

    def write_probabilities(self, tokens: slice, products: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the probabilities of a slice of n tokens to ``out`` (n, W), float32, and returns ``out``.
        ``products`` (n, W) is scratch memory in the dtype of ``head``."""
        states = self.states[self.state_indices[tokens]].to(self.head.dtype)
        logits = out.copy_(torch.mm(states, self.head.T, out=products)).mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return torch.softmax(logits, -1, out=logits)


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy of log_p = log_softmax(hidden @ head.T), summed over tokens:

        loss = -(hard * log_p[label] + soft * sum over ids k of p[k] * log_p[k])

    hard and soft are the two columns of ``weights`` (N, 2), and p is the target's distribution. The arguments are those
    of :func:`soft_cross_entropy`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor,
        target: TargetDistribution | None, chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros(head.shape, device=head.device) if ctx.needs_input_grad[1] else None
        ranks = torch.empty(hidden.shape[0], dtype=torch.long, device=hidden.device)
        # Buffers are allocated once: on a CPU, allocating large memory takes as long as the computation.
        size = (min(chunk, hidden.shape[0]), head.shape[0])
        products = head.new_empty(size)
        logits, scratch = (torch.empty(size, device=head.device) for _ in range(2))
        chunk_grad = torch.empty_like(head) if grad_head is not None else None
        # On a CPU, gradients of the head are added in parts: a whole sum would first make a float32 copy of the matrix.
        part_rows = LOGITS_CHUNK if head.device.type == "cpu" else len(head)
        for start in range(0, hidden.shape[0], chunk):
            tokens = slice(start, start + chunk)
            states = hidden[tokens].to(head.dtype)
            (hard, soft), label, n = weights[tokens].split(1, 1), labels[tokens, None], len(states)
            z = logits[:n].copy_(torch.mm(states, head.T, out=products[:n]))
            # A tie or NaN counts as wrong. torch.lt writes floats, because a CPU sums booleans ten times slower.
            ranks[tokens] = len(head) - 1 - torch.lt(z, z.gather(1, label), out=scratch[:n]).sum(-1).long()
            log_p = torch.log_softmax(z, -1, out=scratch[:n])
            loss -= (hard * log_p.gather(1, label)).sum()
            p = None if target is None else target.write_probabilities(tokens, products[:n], z)
            if p is not None:
                loss -= (soft * torch.bmm(p[:, None], log_p[:, :, None])[:, 0]).sum()
            if grad_hidden is None and grad_head is None:
                continue
            # The gradient of the logits: (hard + soft) * softmax(z) - hard * onehot(label) - soft * p.
            grad_z = log_p.exp_().mul_(hard + soft).scatter_add_(1, label, -hard)
            grad_z = products[:n].copy_(grad_z if p is None else grad_z.sub_(p.mul_(soft)))
            if grad_hidden is not None:
                grad_hidden[tokens] = grad_z @ head
            if grad_head is not None and chunk_grad is not None:
                torch.mm(grad_z.T, states, out=chunk_grad)
                for total, part in zip(grad_head.split(part_rows), chunk_grad.split(part_rows), strict=True):
                    total += part
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(ranks)
        return loss, ranks

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        factor = grads[0]  # the gradient of the loss; ranks have none
        return (
            None if grad_hidden is None else grad_hidden * factor.to(grad_hidden.dtype),
            None if grad_head is None else (grad_head * factor).to(ctx.head_dtype),
            *[None] * 4,  # labels, weights, target and chunk
        )


def soft_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | float = 1.0,
    target: TargetDistribution | None = None, distill: float = 0.0, chunk: int = LOGITS_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Computes the cross-entropy with the text's tokens and with the target's distribution, summed over tokens.

    Args:
        hidden: (N, hidden size) states of the draft.
        head: (W, hidden size), frozen or trained, bfloat16 or float32: the dtype of matrix products. Log-sum-exp and
            sums are float32.
        labels: (N,) draft ids of the text's next tokens; -1 for a token that the draft's vocabulary lacks.
        weights: (N,), the weight of each token.
        target: the target's distribution; None if ``distill`` is 0.
        distill: share of the loss that is the cross-entropy with ``target``.
        chunk: number of tokens whose logits are in memory at once.

    Returns:
        The loss, a scalar, and (N,) the rank of each label: how many other ids have a logit at least as large.
    """
    if not torch.is_grad_enabled():  # an autograd function's forward cannot see this, and would compute gradients
        hidden, head = hidden.detach(), head.detach()
    token_weights = (torch.ones_like(labels) * weights).float()
    hard, soft = token_weights * (1 - distill) * (labels >= 0), token_weights * distill
    return _SoftCrossEntropy.apply(hidden, head, labels.clamp_min(0), torch.stack([hard, soft], 1), target, chunk)
