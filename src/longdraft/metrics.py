"""Definitions of the metrics that results, server, commands and benchmarks report (docs/figures.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import mean
from typing import Literal

TokenCounts = tuple[int, int]
"""The number of an output's new tokens (without the first, which the prefill emits), and of its verifications."""
Average = Literal["pooled", "mean"]
"""An average over outputs: pooled (ratio of the sums) or mean (mean of the ratios)."""


def average(samples: Iterable[tuple[float, float]], how: Average = "pooled") -> float | None:
    """The average of ratios, given as (numerator, denominator); None if all denominators are 0.

    The pooled average of :data:`TokenCounts` is the mean accepted length.
    """
    ratios = [(x, y) for x, y in samples if y > 0]
    if not ratios:
        return None
    return mean(x / y for x, y in ratios) if how == "mean" else sum(x for x, _ in ratios) / sum(y for _, y in ratios)


def standard_error(samples: Iterable[tuple[float, float]], how: Average = "pooled") -> float | None:
    """Jackknife standard error of :func:`average`: each sample is left out once. None for fewer than two samples."""
    ratios = [sample for sample in samples if sample[1] > 0]
    averages = [average(ratios[:i] + ratios[i + 1 :], how) or 0.0 for i in range(len(ratios))]
    n, center = len(ratios), mean(averages or [0.0])
    return math.sqrt((n - 1) / n * sum((x - center) ** 2 for x in averages)) if n > 1 else None


def tokens_per_second(tokens: int, seconds: float) -> float | None:
    """Decoding speed: new tokens without the prefill's / seconds after the prefill. None if either is 0."""
    return tokens / seconds if tokens > 0 and seconds > 0 else None
