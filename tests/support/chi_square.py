"""Pearson's chi-square test of samples against a distribution, with rare cells pooled."""

from __future__ import annotations

import torch
from scipy.stats import chisquare


def p_value(counts: torch.Tensor, law: torch.Tensor, cells: int = 8) -> float:
    """The p-value of observed counts; 0 if an outcome of probability 0 occurred.

    Args:
        counts: how often each outcome occurred, of any shape.
        law: the probability of each outcome, or a multiple of it.
        cells: minimum number of cells; fewer are an error, as they show nothing.
    """
    observed, law = counts.flatten().double(), law.flatten().double()
    expected = law / law.sum() * observed.sum()
    impossible = law / law.sum() < 1e-12
    if observed[impossible].sum() > 0:
        return 0.0
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    assert keep.sum() >= cells, "too few cells for a test"
    return float(chisquare(observed[keep], expected[keep] * (observed.sum() / expected[keep].sum())).pvalue)
