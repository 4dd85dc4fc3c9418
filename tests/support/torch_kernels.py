"""Stand-ins for torch's attention kernels for NVIDIA GPUs that compute the same on CPU tensors.

They are registered with torch's dispatcher, so calls are checked against the real schemas. As with the real kernels,
sequences may begin anywhere, in any order, and overlap; each has ``seqused_k`` keys. Without keys the log-sum-exp is
infinite in one kernel and NaN in the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Arguments of each call of the flash kernel that matter for speed: queries, KV heads, max_q, max_k, causal.
calls: list[tuple[int, int, int, int, bool]] = []
counted: Counter[str] = Counter()


def _part(q, k, v, scale, causal):
    """q (Tq, H, d) on k, v (n, H, d): output (Tq, H, d) and lse (H, Tq); weights in q's dtype, sums in float32."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    if causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1)
    out = torch.einsum("hqk,khd->qhd", weights.to(q.dtype).float(), v.float()) / total.t()[..., None]
    return out.to(q.dtype), top[..., 0] + total.log()


def _check(q, k, v, *numbers):
    assert q.dtype == k.dtype == v.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    for x, size in numbers:
        assert x.dtype == torch.int32 and x.is_contiguous() and x.shape == (size,)


def _flash(
    q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None,
):  # fmt: skip
    batch, heads, kv_heads = len(cum_q) - 1, q.shape[1], k.shape[1]
    assert q.element_size() == 2 and q.shape[2] % 8 == 0 and q.shape[2] <= 256 and heads % kv_heads == 0
    assert dropout == 0 and not debug and scale is not None and batch > 0
    assert window_size_left is window_size_right is None
    _check(q, k, v, (cum_q, batch + 1), (cum_k, batch + 1), (seqused_k, batch))
    calls.append((len(q), kv_heads, max_q, max_k, causal))
    o, lse = torch.zeros_like(q), torch.full((heads, len(q)), math.inf)
    for a, b, start, n in zip(cum_q.tolist(), cum_q[1:].tolist(), cum_k.tolist(), seqused_k.tolist(), strict=False):
        assert b - a <= max_q and n <= max_k and start >= 0 and start + n <= len(k)
        if n:
            own = (x[start : start + n].repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            o[a:b], lse[:, a:b] = _part(q[a:b], *own, scale, causal and max_q > 1)
    return o, lse, torch.empty(2), torch.empty(0), torch.empty(0)


def _efficient(
    q, k, v, bias, cum_q, cum_k, max_q, max_k, dropout, mask_type, compute_log_sumexp=False, *,
    scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    batch, heads = len(cum_q) - 1, q.shape[2]
    counted["efficient"] += 1
    assert q.shape[0] == k.shape[0] == 1 and heads == k.shape[2] and q.shape[3] * q.element_size() % 16 == 0
    assert bias is None and dropout == 0 and mask_type == 0 and compute_log_sumexp and scale is not None
    _check(q, k, v, (cum_q, batch + 1), (cum_k, batch + 1), (seqlen_k, batch))
    o, lse = torch.full_like(q, math.nan), torch.full((batch, heads, math.ceil(max_q / 32) * 32), math.nan)
    for i, (a, b, start, n) in enumerate(zip(cum_q, cum_q[1:], cum_k, seqlen_k, strict=False)):
        assert b - a <= max_q and n <= max_k and start >= 0 and start + n <= k.shape[1]
        if n:
            own = (x[0, start : start + n] for x in (k, v))
            o[0, a:b], lse[i, :, : b - a] = _part(q[0, a:b], *own, scale, False)
    return o, lse, torch.empty(()), torch.empty(()), max_q, max_k


@contextmanager
def registered() -> Iterator[None]:
    """Registers the stand-ins with torch's dispatcher for CPU tensors."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_flash_attention_forward", _flash, "CPU")
        library.impl("_efficient_attention_forward", _efficient, "CPU")
        calls.clear()
        counted.clear()
        yield
    finally:
        library._destroy()
