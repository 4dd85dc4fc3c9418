"""Mends a mistake in vLLM's CPU backend: text that is sampled with drafts follows no distribution. GPUs are right."""

from __future__ import annotations

from typing import Any

import torch

from longdraft.native.boundary import CPU_FLOAT32, CPU_INT64


def patch_sampling() -> None:
    """Replaces vLLM's function that repeats a request's temperature, top-k and top-p for each of its drafted tokens.

    On a CPU, vLLM 0.32 leaves the result unwritten (its pull request 42638), and top-k fails in a step that verifies no
    drafts. Does nothing if vLLM is right already.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler as sampler

    if not current_platform.is_cpu() or sampler.apply_sampling_constraints.__module__ == __name__:
        return
    values = torch.tensor([0.5, 0.25], **CPU_FLOAT32)
    if not torch.equal(sampler.expand_batch_to_tokens(values, torch.tensor([1, 3], **CPU_INT64), 3), values[[0, 1, 1]]):
        sampler.expand_batch_to_tokens = expand_batch_to_tokens
    constrained = sampler.apply_sampling_constraints

    def apply_sampling_constraints(logits: torch.Tensor, *others: Any) -> Any:
        return constrained(logits, *others) if len(logits) else logits

    sampler.apply_sampling_constraints = apply_sampling_constraints


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeats the number of each request, (n,), for each of its drafted tokens: (num_tokens,).

    Args:
        cu_num_tokens: (n,) how many tokens are drafted up to and including each request.
        replace_from, replace_to: values equal to the first become the second.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
