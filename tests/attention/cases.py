"""Arguments of attention functions, and the comparison with the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from longdraft.attention import reference
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers

# float32: another order of summation. 16 bits: the output's own rounding (2^-8 and 2^-11 of values up to about 4), and
# that of the softmax weights before they meet V in paths that use a 16-bit kernel.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Query and KV heads.
HEADS = [(4, 4), (6, 2), (4, 1), (8, 1)]


def random_tree(size: int, generator: torch.Generator) -> torch.Tensor:
    """(T, T) ancestor mask of a tree in which every parent is a random earlier node."""
    mask = torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        mask[node] |= mask[int(torch.randint(node, (), generator=generator))]
    return mask


def case(
    lengths: list[int],
    size: int,
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    tree: bool = True,
    mask: torch.Tensor | None = None,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
    behind: int = 0,
    window: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ForwardBatch, float]:
    """Arguments of an attend function. Slots are shuffled, and entries that no token may attend to are NaN.

    Args:
        tree: random trees; False for a causal chain.
        mask: (B, size, behind + size) bool, instead of random trees.
        transposed: keys are transposed in memory.
        behind: the tree offset.
        window: keys that a token attends to, the last ones of its path; None for all.
    """
    generator = torch.Generator().manual_seed(len(lengths) + 7 * size + head_dim + 1000 * seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    slots = (torch.randperm(len(lengths) + 1, generator=generator) + 1)[: len(lengths)].tolist()
    width = behind + size
    q = randn(len(lengths), heads[0], size, head_dim)
    shape = (len(lengths) + 2, heads[1], max(lengths) + width + 3, head_dim)
    keys, values = (torch.full(shape, math.nan) for _ in range(2))
    for slot, n in zip(slots, lengths, strict=True):
        keys[slot, :, : n + width] = randn(heads[1], n + width, head_dim)
        values[slot, :, : n + width] = randn(heads[1], n + width, head_dim)
    q, keys, values = (x.to(device, dtype) for x in (q, keys, values))
    if transposed:
        keys = keys.transpose(-1, -2).contiguous().transpose(-1, -2)
    if tree and mask is None:
        mask = torch.stack([random_tree(width, generator)[behind:] for _ in lengths])
    batch = ForwardBatch.make(slots, lengths, size, mask, device, behind)
    if window is not None:
        ends = batch.prefix_lens_t.unsqueeze(1) + batch.depths(batch.prefix_lens_t.device) + 1
        batch = replace(batch, window_starts=(ends - window).clamp(min=0).int())
    return q, keys, values, batch, 1.3 * head_dim**-0.5


def make_modifiers(softcap: float | None, sinks: bool, heads: int, device: str = "cpu") -> ScoreModifiers:
    """A soft cap, and sinks of some size."""
    if softcap is None and not sinks:
        return NO_MODIFIERS
    found = torch.randn(heads, generator=torch.Generator().manual_seed(heads)) + 1
    return ScoreModifiers(softcap, found.to(device) if sinks else None)


def assert_like_reference(attend, q, keys, values, batch, scale, modifiers=NO_MODIFIERS, tolerance=None):
    extra_args = () if modifiers is NO_MODIFIERS else (modifiers,)  # paths without windows take none
    expected = reference.attend(q, keys, values, batch, scale, *extra_args)
    output = attend(q, keys, values, batch, scale, *extra_args)
    assert output.shape == q.shape and output.dtype == q.dtype
    tolerance = TOLERANCE[q.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(output.float(), expected.float(), atol=tolerance, rtol=tolerance)
