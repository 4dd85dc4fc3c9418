"""Whether draws follow a distribution: Pearson's chi-square, with rare cells pooled."""

from __future__ import annotations

import torch
from scipy.stats import chisquare


def p_value(counts: torch.Tensor, law: torch.Tensor, cells: int = 8) -> float:
    """How likely counts as far off as these are under a distribution; 0 where something came out that cannot.

    Args:
        counts: how often each outcome came, of any shape. law: the probability of each, or a multiple of it.
        cells: fails with fewer left than this, which could tell nothing.
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
    assert keep.sum() >= cells, "too few cells to tell anything"
    return float(chisquare(observed[keep], expected[keep] * (observed.sum() / expected[keep].sum())).pvalue)
