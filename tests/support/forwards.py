"""A forward of the target, written in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longdraft.memory.store import KVStore
from longdraft.model.outputs import NO_TAPS, Taps, TargetOutput
from longdraft.model.runner import TargetRunner


def forward(
    runner: TargetRunner,
    tokens: Sequence[Sequence[int]] | torch.Tensor,
    store: KVStore,
    slots: Sequence[int],
    *,
    logits: Any = "all",
    taps: Taps = NO_TAPS,
    check: bool = True,
    **shape: Any,
) -> TargetOutput:
    """A forward over a batch; ``shape``: as of :meth:`KVStore.make_forward_batch`."""
    return runner.forward(
        store.make_forward_batch(slots, tokens, **shape), store, logits=logits, taps=taps, check_nan=check
    )
