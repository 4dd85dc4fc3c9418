"""Keeps token ids in arrays, because comparing arrays is about twenty times as fast as comparing lists."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

# Number of tokens that common_prefix_len compares at a time at first. A power of two, because it is halved down to 1.
_STRIDE = 4096


def to_array(tokens: Sequence[int]) -> array[int]:
    """Returns token ids as an array of 64-bit integers."""
    return tokens if isinstance(tokens, array) else array("q", tokens)


def common_prefix_len(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Returns the number of leading tokens (or characters) that two sequences share."""
    if type(a) is not type(b):  # a slice of a tuple never equals a slice of a list
        a, b = to_array(a), to_array(b)
    num_shared, min_len, stride = 0, min(len(a), len(b)), _STRIDE
    while stride:
        # Skip slices of ``stride`` tokens while the slices are equal, then try half the stride.
        while (end := num_shared + stride) <= min_len and a[num_shared:end] == b[num_shared:end]:
            num_shared = end
        stride //= 2
    return num_shared
