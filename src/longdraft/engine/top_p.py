"""Samples by top-p without sorting the vocabulary: the likeliest tokens tell where the border lies.

A sort of the logits of 60 nodes and 128,000 tokens takes a GPU longer than the rest of sampling. With the random
numbers e known, a sample is the argmax of p / e over the tokens that top-p keeps. It is the same for every set that
holds the surely kept tokens and no surely removed one, if its winner is surely kept: so tokens at the border, where
rounding or equal logits decide, need not be told apart.
"""

from __future__ import annotations

import torch

# Tokens of a node that are sorted, and how often they must fit into the vocabulary, or nothing is gained.
LIKELIEST, TIMES = 1024, 8
# Sums of probabilities in float32, in any order, differ by less than this; and two quotients p / e, relatively.
MARGIN, NEAR = 1e-5, 1e-6


def pays(vocabulary: int) -> bool:
    """True if the vocabulary is so large that sorting a part of it is faster."""
    return vocabulary >= TIMES * LIKELIEST


def samples(scores: torch.Tensor, p: float, numbers: torch.Tensor) -> torch.Tensor:
    """The tokens that are sampled after transformers' ``TopPLogitsWarper``.

    Args:
        scores: (n, vocabulary) float32.
        p: above 0 and below 1.
        numbers: (n, vocabulary) exponential random numbers.

    Returns:
        (n,) token ids; -1 for a node whose token only the sort of all tokens tells.
    """
    values = scores.topk(min(LIKELIEST, scores.shape[-1]), dim=-1).values
    sums = (values - scores.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
    before = torch.nn.functional.pad(sums, (1, 0))[:, :-1]  # of the likelier tokens
    last, infinity = values[:, -1], float("inf")
    # Tokens above ``ceiling`` are surely kept, those under ``floor`` surely removed. Beyond the likeliest none is sure.
    ceiling = values.masked_fill(before < p - MARGIN, -infinity).amax(-1).maximum(last)
    floor = values.masked_fill(before > p + MARGIN, infinity).amin(-1)
    floor = floor.masked_fill(floor <= last, -infinity)
    quotients = (scores.softmax(-1) / numbers).masked_fill(scores < floor[:, None], 0)
    best, tokens = quotients.topk(2, dim=-1)
    sure = scores.gather(-1, tokens[:, :1])[:, 0] > ceiling
    return tokens[:, 0].masked_fill(~(sure & (best[:, 0] > best[:, 1] * (1 + NEAR))), -1)
