"""Definitions of the figures, one each, for results, the server, the commands and the bench (docs/figures.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import mean
from typing import Literal

TokenCounts = tuple[int, int]
"""New tokens of a text without the prefill's, and the number of its verification forwards."""
Average = Literal["pooled", "mean"]
"""An average over texts: pooled (quotient of the sums) or mean (mean of the quotients)."""


def average(samples: Iterable[tuple[float, float]], how: Average = "pooled") -> float | None:
    """One figure of texts that have a numerator and a denominator each; None if all denominators are 0.

    Of :data:`TokenCounts`, pooled, it is the mean accepted length.
    """
    own = [(x, y) for x, y in samples if y > 0]
    if not own:
        return None
    return mean(x / y for x, y in own) if how == "mean" else sum(x for x, _ in own) / sum(y for _, y in own)


def standard_error(samples: Iterable[tuple[float, float]], how: Average = "pooled") -> float | None:
    """Jackknife standard error of :func:`average`: each text is left out in turn; None of fewer than two."""
    own = [text for text in samples if text[1] > 0]
    without = [average(own[:i] + own[i + 1 :], how) or 0.0 for i in range(len(own))]
    n, centre = len(own), mean(without or [0.0])
    return math.sqrt((n - 1) / n * sum((x - centre) ** 2 for x in without)) if n > 1 else None


def tokens_per_second(tokens: int, seconds: float) -> float | None:
    """Decoding speed: new tokens but the prefill's / seconds after the prefill; None if nothing was decoded there."""
    return tokens / seconds if tokens > 0 and seconds > 0 else None
