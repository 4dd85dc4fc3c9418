"""Top-p for several rows at once on a GPU, without sorting the vocabulary."""

from __future__ import annotations

import torch

from longdraft.attention import custom_ops


def top_p_threshold(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Returns the lowest probability (rows,) that top-p keeps of each row of float32 ``probabilities`` (rows,
    vocabulary): the more probable tokens sum to less than ``top_p``. Equal probabilities are all kept."""
    ordered = probabilities.sort(dim=-1, descending=True).values
    num_kept = (ordered.cumsum(-1) - ordered < top_p).sum(-1, keepdim=True)
    return ordered.gather(-1, num_kept - 1)[:, 0]


custom_ops.define_op(top_p_threshold, "longdraft.model.gpu.top_p_kernel")


def keep_top_p(scores: torch.Tensor, top_p: float, filter_value: float) -> torch.Tensor:
    """Returns scores (rows, vocabulary) with ``filter_value`` for the tokens that top-p leaves out."""
    probabilities = scores.softmax(-1)
    threshold: torch.Tensor = torch.ops.longdraft.top_p_threshold(probabilities, top_p)
    return scores.masked_fill(probabilities < threshold[:, None], filter_value)
