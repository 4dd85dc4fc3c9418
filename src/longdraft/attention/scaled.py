"""Attention to keys and values in eight bits on a GPU: our Triton kernels read them as they are stored.

torch's kernels read 16 bits. So whichever path serves a target's other stores, Triton serves these. In
registers a number is multiplied by its row's scale and rounded to the queries' dtype.

``longdraft::scaled_attention`` has its definition here, which serves on a CPU; on a GPU it is in
:mod:`.triton_backend`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from longdraft.attention import fusing
from longdraft.attention.block import PLAIN, Block, Scoring
from longdraft.attention.prefix import PrefixAttend
from longdraft.attention.reference import Attend, partial_attention
from longdraft.attention.transfer import on_device
from longdraft.errors import CapabilityError
from longdraft.native.boundary import FLOATS
from longdraft.native.scaled import Scaled


def or_scaled(attend: Attend) -> Attend:
    """``attend``, which takes keys and values in eight bits too."""

    def either(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float, *scoring: Scoring
    ) -> torch.Tensor:
        if isinstance(keys, Scaled):
            return _attend(q, keys, values, block, scale, *(scoring or (PLAIN,)), tree=True)
        return attend(q, keys, values, block, scale, *scoring)

    return either


def prefix_or_scaled(attend: PrefixAttend) -> PrefixAttend:
    """``attend``, which takes keys and values in eight bits too."""

    def either(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
        if isinstance(keys, Scaled):
            return _attend(q, keys, values, block, scale, PLAIN, tree=False)
        return attend(q, keys, values, block, scale)

    return either


@functools.cache
def check(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Compares the operator with its definition, on made-up rows. Waits for the device, the first time.

    Raises:
        CapabilityError: they differ, or the kernels cannot run here.
    """
    generator, group, width = torch.Generator().manual_seed(0), 4, 5
    q, keys, values = (
        on_device(torch.randn(2, heads, rows, head_dim, generator=generator, **FLOATS).to(dtype), device)
        for heads, rows in ((2 * group, width), (2, 90), (2, 90))
    )
    block = Block.make([1, 0], [80, 9], width, torch.ones((2, width, width), **FLOATS).bool().tril(), device)
    given = _arguments(q, Scaled.of(keys), Scaled.of(values), block, head_dim**-0.5, PLAIN, True)
    if (reason := fusing.fault("scaled_attention", scaled_attention, *given)) is not None:
        raise CapabilityError(
            f"Attention to keys and values in int8 does not work on this GPU: {reason}. Leave kv_dtype and view_dtype "
            "out, and report the GPU and Triton's version."
        )


def _arguments(
    q: torch.Tensor, keys: Scaled, values: Scaled, block: Block, scale: float, scoring: Scoring, tree: bool
) -> tuple[Any, ...]:
    """The operator's arguments."""
    return (
        *(q, keys.numbers, keys.scales, values.numbers, values.scales, block.slots_t, block.lengths_t),
        *(block.mask, scoring.sinks, block.offset, max(block.lengths, default=0), tree, scale, scoring.softcap),
    )


def _attend(
    q: torch.Tensor, keys: Scaled, values: Scaled, block: Block, scale: float, scoring: Scoring, tree: bool
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.longdraft.scaled_attention(*_arguments(q, keys, values, block, scale, scoring, tree))
    return out


def scaled_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor,
    values: torch.Tensor,
    value_scales: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    offset: int,
    bound: int,
    tree: bool,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention to whole prefixes, and with ``tree`` to what a block sees behind them.

    Args:
        q: (B, Hq, T, d).
        keys, values: (slots, Hkv, capacity, d) int8. key_scales, value_scales: (slots, Hkv, capacity) float32.
        slots, lengths: (B,) int32, slot and rows of each prefix.
        mask, offset: as in :class:`~longdraft.attention.block.Block`.
        sinks, softcap: as in :class:`~longdraft.attention.block.Scoring`.
        bound: upper bound on the lengths, a host integer; it never affects the result.

    Returns:
        (B, Hq, T, d) in q's dtype.
    """
    out, scoring = torch.empty_like(q), Scoring(softcap, sinks)
    block = Block.make(slots.tolist(), lengths.tolist(), q.shape[2], mask, q.device, offset)
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        end, seen = (n + block.width, block.visible(b, q.device)) if tree else (n, None)
        rows = Scaled(keys, key_scales)[slot, :, :end], Scaled(values, value_scales)[slot, :, :end]
        k, v = (x.to(q.dtype) for x in rows)
        out[b] = partial_attention(q[b], k, v, scale, seen, scoring)[0].to(q.dtype)
    return out


fusing.define(
    "scaled_attention(Tensor q, Tensor keys, Tensor key_scales, Tensor values, Tensor value_scales, Tensor slots, "
    "Tensor lengths, Tensor? mask, Tensor? sinks, int offset, int bound, bool tree, float scale, float? softcap) "
    "-> Tensor",
    scaled_attention,
    "longdraft.attention.triton_backend",
)
