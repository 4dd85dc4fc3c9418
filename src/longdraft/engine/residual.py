"""Residual acceptance: a drafted token is kept with the odds that leave the target's distribution as it is.

A token x that was sampled from the draft distribution q is kept with probability min(1, p(x) / q(x)); if it is not, the
next token is sampled from what is left, max(p - q, 0), normalised (Leviathan et al. 2023, section 2.3; Chen et al.
2023). Of several tokens sampled from q without replacement each is tried in turn, p being what the last refusal left
and q what the tokens not yet tried were sampled from (Jeon et al. 2024, arXiv:2402.14160). What comes out is
distributed as p, given that x came from q and by chance alone: so the drafter says its true q, and its random numbers
and the target's are independent.

The alternative, one sample from p a node (:mod:`longdraft.engine.accept`), keeps a token x that was sampled from q
with probability p(x), which is never more often. But it takes any tree, and a tree may hold the likeliest tokens.
"""

from __future__ import annotations

import torch

from longdraft.trees.tree import SampledChildren


def sample(p: torch.Tensor, sampled: SampledChildren, generator: torch.Generator | None = None) -> int:
    """A token distributed as p: one of the drafted ones where that can be.

    Args:
        p: (vocabulary,) the target's probabilities.
        sampled: what was drafted in its place. generator: of the target's samples; None for torch's global one.
    """
    p, q = p.double(), sampled.q.double().clone()
    for token in sampled.tokens:
        if torch.rand((), generator=generator, dtype=torch.double, device=p.device) * q[token] < p[token]:
            return token
        left = (p - q).clamp_min(0.0)
        total = left.sum()
        if not total > 0:  # p and q are the same but for rounding, which refused a token that never should be
            break
        p = left / total
        q[token] = 0.0
        q /= q.sum().clamp_min(torch.finfo(torch.double).tiny)
    return int(torch.multinomial(p, num_samples=1, generator=generator))
