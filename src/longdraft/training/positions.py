"""Position indices of training text (LongSpec, section 3.2)."""

from __future__ import annotations

import torch

# The first tokens draw attention whatever they say; they keep their place.
ANCHORS = 4


def anchor_offset(length: int, offset: int) -> torch.Tensor:
    """Anchor-offset indices: 0 .. 3 stay, every later token is shifted by one offset.

    With offsets drawn over the whole context, a draft that is trained on short text meets every position, and the
    target, given the same indices, loses next to nothing.

    Returns:
        (length,) int64; ``0 .. length - 1`` for offset 0.
    """
    positions = torch.arange(length)
    positions[ANCHORS:] += offset
    return positions


def largest_offset(length: int, anchor_offset: int, context_length: int) -> int:
    """The largest offset for a text: what was asked for, less where the text would leave the context."""
    return max(0, min(anchor_offset, context_length - length))
