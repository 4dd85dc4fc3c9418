"""Patches a bug in vLLM's CPU backend: text sampled with drafts has a wrong distribution. GPUs are not affected."""

from __future__ import annotations

from typing import Any

import torch

from longdraft.native.boundary import CPU_FLOAT32, CPU_INT64


def patch_sampling() -> None:
    """Replaces vLLM's function that repeats a request's temperature, top-k and top-p for each of its drafted tokens.

    On a CPU, vLLM 0.32 does not write the result (its pull request 42638), and top-k fails in a step without drafts.
    Does nothing if vLLM is correct.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler as sampler

    if not current_platform.is_cpu() or sampler.apply_sampling_constraints.__module__ == __name__:
        return
    values = torch.tensor([0.5, 0.25], **CPU_FLOAT32)  # a test: requests with 1 and 2 drafted tokens
    if not torch.equal(sampler.expand_batch_to_tokens(values, torch.tensor([1, 3], **CPU_INT64), 3), values[[0, 1, 1]]):
        sampler.expand_batch_to_tokens = expand_batch_to_tokens
    original = sampler.apply_sampling_constraints

    def apply_sampling_constraints(logits: torch.Tensor, *args: Any) -> Any:
        return original(logits, *args) if len(logits) else logits  # 0 rows: a step without drafts

    sampler.apply_sampling_constraints = apply_sampling_constraints


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeats the value of each request for each drafted token of the request, and returns (num_tokens,).

    Args:
        x: (requests,), the values.
        cu_num_tokens: (requests,) cumulative number of drafted tokens.
        num_tokens: number of all drafted tokens.
        replace_from: values equal to this one are replaced.
        replace_to: the replacement.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
