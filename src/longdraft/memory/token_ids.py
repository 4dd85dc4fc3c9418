"""Token ids as arrays, whose comparison is about twenty times as fast as that of lists."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

# Tokens compared at a time at first; a power of two, as it is halved down to 1.
_STRIDE = 4096


def to_array(tokens: Sequence[int]) -> array[int]:
    """Token ids as an array of 64-bit integers."""
    return tokens if isinstance(tokens, array) else array("q", tokens)


def common_prefix_len(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of leading tokens (or characters) that two sequences share."""
    if type(a) is not type(b):  # slices of a tuple and of a list are never equal
        a, b = to_array(a), to_array(b)
    shared, shorter, stride = 0, min(len(a), len(b)), _STRIDE
    while stride:
        # Skips slices of this size while they are equal, then tries half the size.
        while shared + stride <= shorter and a[shared : shared + stride] == b[shared : shared + stride]:
            shared += stride
        stride //= 2
    return shared
