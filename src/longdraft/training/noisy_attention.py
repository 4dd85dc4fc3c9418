"""The two attentions of LongSpec's training, with flash kernels and no mask as large as the text.

Flash noisy training (LongSpec, section 3.2): while drafting, the newest key that cross-attention sees is j positions
before the query, j = 1 for the root and one more for each level of the tree. Shifting queries against keys trains for
that with an ordinary causal kernel:

    O[j:] = attention(Q[j:], K[:-j], V[:-j])

If only the last rows of a text are learned, the queries are those rows, and the causal mask is aligned to the lower
right corner: the last query sees the last key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from longdraft.training.drafted_attention import drafted

# Up to so many query rows a CPU computes the weights itself instead of calling its flash kernel.
FEW_ROWS = 512


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q (Hq, Tq, d) are the last Tq of the positions of k, v (Hkv, Tk, d): query i sees keys up to Tk - Tq + i."""
    rows, keys = q.shape[1], k.shape[1]
    if rows > keys:
        raise ValueError(f"{rows} queries for {keys} keys: the first ones would see nothing")
    k, v = k.to(q.dtype), v.to(q.dtype)
    if rows == keys:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    return drafted(q, k, v)  # torch's own would make a mask of rows x keys on a CPU


def noisy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shift: int) -> torch.Tensor:
    """Cross-attention whose newest visible key is ``shift`` positions before each query.

    Args:
        q: (Hq, Tq, d), the last Tq positions of a text.
        k, v: (Hkv, T, d), all positions of the text, T - shift >= Tq. They are the target's and get no gradient.
    """
    end = k.shape[1] - shift
    k, v = k[:, :end], v[:, :end]
    if q.device.type == "cpu" and q.shape[1] <= FEW_ROWS and end >= q.shape[1]:
        out: torch.Tensor = _FrozenKeys.apply(q, k.to(q.dtype), v.to(q.dtype))
        return out
    return causal(q, k, v)


class _FrozenKeys(torch.autograd.Function):
    """Causal attention, aligned to the lower right, of a few rows to many keys that need no gradient.

    torch's flash kernel for CPUs spends most of its backward pass on the gradients of K and V. Here these are not
    computed, K and V are read once per KV head, and the few rows of weights are kept.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows, keys, dim = q.shape[1], k.shape[1], q.shape[2]
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu_(1)
        folded = q.reshape(k.shape[0], -1, dim)  # (Hkv, group * rows, d)
        out = torch.empty_like(folded)
        weights = []
        for head in range(k.shape[0]):
            scores = torch.mm(folded[head] * dim**-0.5, k[head].T)
            scores.view(-1, rows, keys)[..., keys - rows :].masked_fill_(hidden, float("-inf"))
            weights.append(torch.softmax(scores, -1))
            torch.mm(weights[-1], v[head], out=out[head])
        ctx.save_for_backward(k, v, out, *weights)
        return out.view(q.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        k, v, out, *weights = ctx.saved_tensors
        gradient = gradients[0].reshape(out.shape)
        # d softmax: P * (dP - rowsum(dP * P)), and that row sum is dO . O
        shared = (gradient.float() * out.float()).sum(-1, keepdim=True).to(out.dtype)
        grad_q = torch.empty_like(out)
        for head, weight in enumerate(weights):
            scores = torch.mm(gradient[head], v[head].T).sub_(shared[head]).mul_(weight)
            torch.mm(scores, k[head], out=grad_q[head])
        return grad_q.mul_(out.shape[-1] ** -0.5).view(gradients[0].shape), None, None


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention to the last ``window`` keys, the query's own included. Work and memory grow with T * window.

    Args:
        q: (Hq, Tq, d), the last Tq of the positions of k, v (Hkv, Tk, d).
    """
    if k.shape[1] <= window:
        return causal(q, k, v)
    return drafted(q, k.to(q.dtype), v.to(q.dtype), None, window)
