"""What vLLM's CPU backend does wrong to sampled text where anything drafts, put right. GPUs are left alone."""

from __future__ import annotations

from typing import Any

import torch


def mend_sampling() -> None:
    """Temperatures, top-k and top-p of requests are spread over their drafted tokens.

    On a CPU vLLM 0.32 leaves the result unwritten, so that text follows no distribution (its pull request 42638), and
    top-k fails where a step verifies no drafts. Does nothing where that is right already.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler as sampler

    if not current_platform.is_cpu() or sampler.apply_sampling_constraints.__module__ == __name__:
        return
    given = torch.tensor([0.5, 0.25])
    if not torch.equal(sampler.expand_batch_to_tokens(given, torch.tensor([1, 3]), 3), given[[0, 1, 1]]):
        sampler.expand_batch_to_tokens = spread
    constrained = sampler.apply_sampling_constraints

    def apply_sampling_constraints(logits: torch.Tensor, *others: Any) -> Any:
        return constrained(logits, *others) if len(logits) else logits

    sampler.apply_sampling_constraints = apply_sampling_constraints


def spread(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """One number (n,) of each request -> (num_tokens,), one of each of its drafted tokens.

    Args:
        cu_num_tokens: (n,) drafted tokens up to and with each request.
        replace_from, replace_to: numbers that are this become that.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
