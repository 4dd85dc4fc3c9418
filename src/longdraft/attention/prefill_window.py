"""Approximate prefill: a prompt's tokens attend to the first tokens and to a window, and its last tokens to all.

The time of exact attention grows with the square of a prompt's length. Here it grows with the length. The pattern is
StreamingLLM's (Xiao et al. 2024, arXiv:2309.17453), with dense last rows, which ask what the answer needs (the
tri-shape of SCBench, Li et al. 2024, arXiv:2412.10319). Tokens that are decoded attend to everything.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.native.boundary import CPU_INT64
from longdraft.options import whole_number

NUM_FIRST = 128  # first tokens that all tokens see: attention sinks, and usually the system message
NUM_LAST = 512  # last tokens of a prompt, which see all tokens
MIN_WINDOW = 128


def check_prefill_window(window: int | None) -> None:
    """Raises RequestError unless ``window`` is None or a number of tokens that can be used."""
    if window is not None:
        whole_number("prefill_window", window, MIN_WINDOW)


def with_prefill_window(batch: ForwardBatch, window: int) -> ForwardBatch:
    """Returns a prompt's chunk whose tokens see ``window`` tokens, themselves included, besides the first tokens.
    A chunk that sees everything anyway is returned as it is."""
    positions = torch.tensor(batch.prefix_lens, **CPU_INT64)[:, None] + torch.arange(batch.query_len, **CPU_INT64)
    starts = (positions - window + 1).masked_fill(positions >= batch.prompt_len - NUM_LAST, 0)
    if int(starts.max()) <= NUM_FIRST:
        return batch
    starts = starts.clamp_min(0).to(batch.slots_t.device, torch.int32)
    return replace(batch, window_starts=starts, num_first=NUM_FIRST)
