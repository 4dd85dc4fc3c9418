"""Liger's fused linear + cross-entropy, where it is installed and can run: on CUDA, for plain cross-entropy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

# hidden (N, size), head (V, size), tokens (N,) -> the loss, summed over rows
CrossEntropy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

IGNORED = -100


def cross_entropy(device: torch.device) -> CrossEntropy | None:
    """The kernel for a device; None where :func:`longdraft.training.losses.soft_cross_entropy` has to do it.

    That one also knows soft targets and tells ranks, so it is used for distillation and for measuring in any case.
    This path is tested with a stand-in for the package; it has not run on a GPU yet.
    """
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")

    def loss(hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        # A token outside the draft's vocabulary is -1 here, and teaches nothing.
        found: torch.Tensor = fused(head, hidden.to(head.dtype), torch.where(tokens < 0, IGNORED, tokens))
        return found

    return loss
