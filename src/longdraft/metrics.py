"""Computes the metrics that results, the server, commands and benchmarks report (docs/figures.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import mean
from typing import Literal

TokenCounts = tuple[int, int]
"""(new tokens of an output without the first, which the prefill emits; verifications)."""
Average = Literal["pooled", "mean"]
"""The average of ratios of several outputs: "pooled" (ratio of the sums) or "mean" (mean of the ratios)."""


def average(samples: Iterable[tuple[float, float]], how: Average = "pooled") -> float | None:
    """Averages ratios x / y of samples (x, y). Skips samples with y = 0, and returns None if there are no others.
    The pooled average of :data:`TokenCounts` is the mean accepted length."""
    pairs = [(x, y) for x, y in samples if y > 0]
    if not pairs:
        return None
    return mean(x / y for x, y in pairs) if how == "mean" else sum(x for x, _ in pairs) / sum(y for _, y in pairs)


def standard_error(samples: Iterable[tuple[float, float]], how: Average = "pooled") -> float | None:
    """Returns the jackknife standard error of :func:`average`; None unless two samples or more have y > 0."""
    pairs = [(x, y) for x, y in samples if y > 0]
    averages = [average(pairs[:i] + pairs[i + 1 :], how) or 0.0 for i in range(len(pairs))]  # each without one sample
    n, center = len(pairs), mean(averages or [0.0])
    return math.sqrt((n - 1) / n * sum((x - center) ** 2 for x in averages)) if n > 1 else None


def tokens_per_second(tokens: int, seconds: float) -> float | None:
    """Returns the decoding speed: new tokens after the first, by seconds after the prefill. None if either is 0."""
    return tokens / seconds if tokens > 0 and seconds > 0 else None
