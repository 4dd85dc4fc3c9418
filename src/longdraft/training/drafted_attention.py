"""Attention of the training-time test: a row sees what it would see if the rows before it had been drafted.

At step i a row is the last of i drafted rows. It sees the keys of step 0 (made from the target's features) up to i
positions back, and after them one key of each later step: of step s = 1 .. i, the key of the row i - s back. The first
part is causal attention with a shift, the second has i keys for each row; one softmax goes over both.

On a GPU in 16 bits the first part is a flash kernel's (:mod:`longdraft.training.flash_attention`). Elsewhere weights
are computed for a block of queries at a time, in the forward pass and again in the backward pass, and never kept.
Either way memory grows with the length of the text, not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.training.flash_attention import FLASH, Kernels, merged, serves

# Query rows of a block at most, and attention weights of a block at most.
BLOCK = 256
WEIGHTS = 1 << 26


def drafted(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    later: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """Attention of one step of the training-time test over one text.

    Args:
        q: (Hq, n, d), the last n rows of the text.
        k, v: (Hkv, T, d) of step 0, all rows of the text, after RoPE.
        later: keys and values of steps 1 .. i that each row sees, (Hkv, n, i, d) each, the row's own last; None at step
            0. Every row has at least i rows before it.
        window: keys that a row sees, its own included; more than i. None for all.
        kernels: the flash kernel that computes the first part; None takes torch's where it serves.

    Returns:
        (Hq, n, d).
    """
    if later is None:
        empty = k.new_empty(k.shape[0], q.shape[1], 0, k.shape[2])
        later = (empty, empty)
    shift = later[0].shape[2]
    if k.shape[1] - q.shape[1] - shift < 0:
        raise ValueError(f"{k.shape[1]} rows are too few for {q.shape[1]} queries with {shift} drafted rows each")
    if window is not None and window <= shift:
        raise ValueError(f"a window of {window} keys leaves none of step 0 behind {shift} drafted rows")
    if kernels is None and serves(q, k, v):
        kernels = FLASH
    if kernels is not None:
        end = k.shape[1] - shift
        return merged(q, k[:, :end], v[:, :end], *later, None if window is None else window - shift, kernels)
    out: torch.Tensor = _Drafted.apply(q, k, v, *later, window)
    return out


@dataclass
class _Block:
    """Some of the queries, and the keys they see.

    Attributes:
        rows: these queries among all queries. first: the first one's row in the text.
        keys: rows of the text whose keys of step 0 any of the queries sees.
    """

    rows: slice
    keys: slice
    first: int
    shift: int
    window: int | None

    @property
    def size(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def count(self) -> int:
        return self.keys.stop - self.keys.start

    def hide(self, scores: torch.Tensor) -> None:
        """Masks the keys of step 0 that a query does not see, two corners of (..., size, count) scores."""
        at = torch.arange(self.size, device=scores.device)[:, None]
        newest = self.first - self.shift - self.keys.start  # column of the first query's newest key
        columns = torch.arange(newest + 1, self.count, device=scores.device)
        scores[..., newest + 1 :].masked_fill_(columns > at + newest, float("-inf"))
        if self.window is not None and (width := self.first + self.size - self.window - self.keys.start) > 0:
            oldest = self.first - self.window + 1 - self.keys.start  # column of the first query's oldest key
            columns = torch.arange(width, device=scores.device)
            scores[..., :width].masked_fill_(columns < at + oldest, float("-inf"))


def _blocks(heads: int, queries: int, rows: int, shift: int, window: int | None) -> Iterator[_Block]:
    first = rows - queries  # the row of the first query
    widest = rows if window is None else min(rows, window + BLOCK)
    size = max(16, min(BLOCK, WEIGHTS // (heads * widest)))
    for start in range(0, queries, size):
        stop = min(queries, start + size)
        low = 0 if window is None else max(0, first + start - window + 1)
        yield _Block(slice(start, stop), slice(low, first + stop - shift), first + start, shift, window)


def _scores(q: torch.Tensor, k: torch.Tensor, later_k: torch.Tensor, block: _Block) -> torch.Tensor:
    """(Hkv, group, size, count + i), float32 or wider, of q (Hkv, group, size, d), scaled; later_k (Hkv, n, i, d)."""
    heads, group, size, dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    near = torch.bmm(q.reshape(heads, -1, dim), k[:, block.keys].transpose(1, 2)).view(heads, group, size, -1)
    if not block.shift:
        scores = near.to(wide)
        block.hide(scores)
        return scores
    scores = torch.empty(heads, group, size, block.count + block.shift, dtype=wide, device=q.device)
    scores[..., : block.count] = near
    block.hide(scores[..., : block.count])
    scores[..., block.count :] = torch.einsum("hgnd,hnsd->hgns", q.to(wide), later_k[:, block.rows].to(wide))
    return scores


class _Drafted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        later_k: torch.Tensor,
        later_v: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        heads, dim = k.shape[0], k.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            grouped = (q * dim**-0.5).view(heads, -1, q.shape[1], dim)
            out = torch.empty_like(grouped)
            wide = torch.promote_types(q.dtype, torch.float32)
            lse = torch.empty(grouped.shape[:3], dtype=wide, device=q.device)
            for b in _blocks(q.shape[0], q.shape[1], k.shape[1], later_k.shape[2], window):
                scores = _scores(grouped[:, :, b.rows], k, later_k, b)
                largest = scores.amax(-1, keepdim=True)
                p = scores.sub_(largest).exp_()
                mass = p.sum(-1, keepdim=True)
                lse[:, :, b.rows] = (largest + mass.log())[..., 0]
                near = p[..., : b.count].to(v.dtype).view(heads, -1, b.count)
                mixed = torch.bmm(near, v[:, b.keys]).view(heads, -1, b.size, dim).to(wide)
                if b.shift:
                    mixed += torch.einsum("hgns,hnsd->hgnd", p[..., b.count :], later_v[:, b.rows].to(wide))
                out[:, :, b.rows] = mixed.div_(mass)
        ctx.save_for_backward(grouped, k, v, later_k, later_v, out, lse)
        ctx.window = window
        return out.view(q.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, later_k, later_v, out, lse = ctx.saved_tensors
        heads, group, queries, dim = q.shape
        gradient = gradients[0].to(out.dtype).reshape(out.shape)
        # d softmax: P * (dP - rowsum(dP * P)), and that row sum is dO . O
        wide = lse.dtype
        shared = (gradient.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        dq = torch.empty_like(q)
        # A target's keys and values need none.
        dk, dv = (torch.zeros_like(x, dtype=wide) if ctx.needs_input_grad[i] else None for i, x in ((1, k), (2, v)))
        d_later_k, d_later_v = torch.zeros_like(later_k), torch.zeros_like(later_v)
        for b in _blocks(heads * group, queries, k.shape[1], later_k.shape[2], ctx.window):
            mine, up, less = q[:, :, b.rows], gradient[:, :, b.rows], shared[:, :, b.rows]
            p = _scores(mine, k, later_k, b).sub_(lse[:, :, b.rows, None]).exp_()
            near, far = p[..., : b.count], p[..., b.count :]
            flat = up.reshape(heads, -1, dim)
            if dv is not None:
                dv[:, b.keys] += torch.bmm(near.to(q.dtype).view(heads, -1, b.count).transpose(1, 2), flat)
            ds = torch.bmm(flat, v[:, b.keys].transpose(1, 2)).to(wide).view(near.shape)
            ds = ds.sub_(less).mul_(near).to(q.dtype).view(heads, -1, b.count)
            if dk is not None:
                dk[:, b.keys] += torch.bmm(ds.transpose(1, 2), mine.reshape(heads, -1, dim))
            dq_block = torch.bmm(ds, k[:, b.keys]).view(mine.shape)
            if b.shift:
                up, values = up.to(wide), later_v[:, b.rows].to(wide)
                d_far = (torch.einsum("hgnd,hnsd->hgns", up, values) - less) * far
                d_later_v[:, b.rows] = torch.einsum("hgns,hgnd->hnsd", far, up).to(later_v.dtype)
                d_later_k[:, b.rows] = torch.einsum("hgns,hgnd->hnsd", d_far, mine.to(wide)).to(later_k.dtype)
                dq_block = dq_block + torch.einsum("hgns,hnsd->hgnd", d_far, later_k[:, b.rows].to(wide))
            dq[:, :, b.rows] = dq_block
        dq = dq.mul_(dim**-0.5).view(heads * group, queries, dim)
        dk, dv = (None if x is None else x.to(like.dtype) for x, like in ((dk, k), (dv, v)))
        return dq, dk, dv, d_later_k, d_later_v, None
