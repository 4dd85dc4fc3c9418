"""Causal attention of a text's last rows by a flash kernel, merged with a few more keys of each row.

The kernel's part ("near") and each row's own keys ("far") share one softmax:

    L = log(exp(L_near) + sum over far keys of exp(score))          O = exp(L_near - L) O_near + sum of exp(score - L) v

A flash kernel's backward pass computes weights anew as exp(score - L) and takes rowsum(dO * O) off their gradients. It
is given the merged L and O, so what it returns is the near keys' share of the merged attention's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from longdraft.attention import hybrid

# What the backward kernel needs of the forward kernel beside output and log-sum-exp.
State = tuple[torch.Tensor, ...]


class Kernels(NamedTuple):
    """A flash kernel for queries (n, Hq, d), the last ones of keys and values (S, Hkv, d), each up to its own row.

    Attributes:
        forward: (q, k, v, window, scale) -> output (n, Hq, d), log-sum-exp (Hq, n) in float32, state. ``window``: keys
            that a query sees; None for all.
        backward: (gradient, q, k, v, output, log-sum-exp, state, window, scale) -> gradients of q, k, v.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, State]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if torch's flash kernel takes these: 16 bits, all alike, on a GPU that has it, which fake ones stand for."""
    alike = q.dtype == k.dtype == v.dtype and q.element_size() == 2
    stands_in = isinstance(q, FakeTensor) and q.device.type == "cpu"
    return alike and (stands_in or hybrid.unavailable(q.device, q.dtype, q.shape[-1]) is None)


def merged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    later_k: torch.Tensor,
    later_v: torch.Tensor,
    window: int | None,
    kernels: Kernels,
) -> torch.Tensor:
    """q (Hq, n, d) attend to k, v (Hkv, S, d) up to their own row, and to later_k, later_v (Hkv, n, i, d) of their own.

    Args:
        window: keys of k that a row sees; None for all.
    """
    out: torch.Tensor = _Merged.apply(q, k, v, later_k, later_v, window, kernels)
    return out


def _ends(rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 2 * rows, rows, dtype=torch.int32, device=device)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, State]:
    rows, keys = len(q), len(k)
    ends = _ends(rows, q.device), _ends(keys, q.device)
    out, lse, *state, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *ends, rows, keys, 0.0, True, False, scale=scale, **_bounds(window)
    )
    return out, lse, (*ends, *state)


def _backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    state: State,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_ends, k_ends, *random = state
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
        gradient, q, k, v, out, lse, q_ends, k_ends, len(q), len(k), 0.0, True, *random, scale=scale, **_bounds(window)
    )
    return found


def _bounds(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


FLASH = Kernels(_forward, _backward)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        later_k: torch.Tensor,
        later_v: torch.Tensor,
        window: int | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        ctx.window, ctx.kernels, ctx.scale = window, kernels, q.shape[-1] ** -0.5
        heads, far = k.shape[0], later_k.shape[2] > 0
        with torch.autocast(q.device.type, enabled=False):
            out, lse, state = kernels.forward(*(x.transpose(0, 1) for x in (q, k, v)), window, ctx.scale)
            out = out.transpose(0, 1)
            if far:
                scores = _far_scores(q, later_k, ctx.scale)
                near = lse.view(scores.shape[:3])
                both = torch.logaddexp(near, torch.logsumexp(scores, -1))
                mixed = out.reshape(heads, -1, *q.shape[1:]) * (near - both).exp()[..., None]
                mixed += torch.einsum("hgns,hnsd->hgnd", (scores - both[..., None]).exp(), later_v.to(scores.dtype))
                out, lse = mixed.to(q.dtype).view(q.shape), both.view(lse.shape)
        ctx.save_for_backward(q, k, v, later_k, later_v, out, lse, *state)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, later_k, later_v, out, lse, *state = ctx.saved_tensors
        gradient = gradients[0].to(out.dtype)
        turned = (x.transpose(0, 1) for x in (gradient, q, k, v, out))
        found = ctx.kernels.backward(*turned, lse, tuple(state), ctx.window, ctx.scale)
        dq, dk, dv = (x.transpose(0, 1) for x in found)
        d_later_k = d_later_v = None
        if later_k.shape[2]:
            scores = _far_scores(q, later_k, ctx.scale)
            p = scores.sub_(lse.view(scores.shape[:3])[..., None]).exp_()
            wide = p.dtype
            up, of_out, mine = (x.reshape(*p.shape[:3], -1).to(wide) for x in (gradient, out, q))
            ds = torch.einsum("hgnd,hnsd->hgns", up, later_v.to(wide)) - (up * of_out).sum(-1, keepdim=True)
            ds = ds.mul_(p).mul_(ctx.scale)
            d_later_v = torch.einsum("hgns,hgnd->hnsd", p, up).to(later_v.dtype)
            d_later_k = torch.einsum("hgns,hgnd->hnsd", ds, mine).to(later_k.dtype)
            dq = dq + torch.einsum("hgns,hnsd->hgnd", ds, later_k.to(wide)).reshape(q.shape).to(q.dtype)
        return dq, dk, dv, d_later_k, d_later_v, None, None


def _far_scores(q: torch.Tensor, later_k: torch.Tensor, scale: float) -> torch.Tensor:
    """(Hkv, group, n, i), float32 or wider, of q (Hq, n, d) and each row's own keys (Hkv, n, i, d)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.reshape(later_k.shape[0], -1, *q.shape[1:]).to(wide)
    return torch.einsum("hgnd,hnsd->hgns", grouped, later_k.to(wide)).mul_(scale)
