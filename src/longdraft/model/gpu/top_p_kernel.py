"""The Triton kernel of top-p's threshold, :func:`longdraft.model.gpu.top_p.top_p_threshold`.

Positive floats have the order of their bits, so thirty halvings of an interval of integers find the threshold. A
program reads one row, which stays in the L2 cache, so a row's result does not depend on the other rows.
"""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096
ONE = 0x3F800000  # the bits of 1.0; no probability is above
HALVINGS = 30  # 2^30 > ONE


@triton.jit
def top_p_kernel(
    probabilities, thresholds, top_p, size, row_stride, ONE: tl.constexpr, HALVINGS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Writes the threshold of one row. Grid: (rows,)."""
    row = probabilities + tl.program_id(0).to(tl.int64) * row_stride
    lowest = tl.full((), 0, tl.int32)  # the threshold's bits are in [lowest, highest]
    highest = tl.full((), ONE, tl.int32)
    for _ in range(HALVINGS):
        middle = (lowest + highest) // 2
        more_probable = tl.zeros((TILE,), tl.float32)
        for start in range(0, size, TILE):
            tokens = start + tl.arange(0, TILE)
            p = tl.load(row + tokens, mask=tokens < size, other=0.0)
            more_probable += tl.where(p.to(tl.int32, bitcast=True) > middle, p, 0.0)
        is_kept = tl.sum(more_probable, axis=0) < top_p
        highest = tl.where(is_kept, middle, highest)
        lowest = tl.where(is_kept | (lowest == highest), lowest, middle + 1)
    tl.store(thresholds + tl.program_id(0), highest.to(tl.float32, bitcast=True))


def top_p_threshold(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Launches :func:`top_p_kernel`; see :func:`longdraft.model.gpu.top_p.top_p_threshold`."""
    rows, size = probabilities.shape
    thresholds = probabilities.new_empty(rows)
    if rows:
        with torch.cuda.device_of(probabilities):
            top_p_kernel[(rows,)](
                probabilities, thresholds, top_p, size, probabilities.stride(0), ONE=ONE, HALVINGS=HALVINGS, TILE=TILE,
                num_warps=8,
            )  # fmt: skip
    return thresholds
