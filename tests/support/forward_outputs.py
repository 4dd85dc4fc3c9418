"""All outputs and KV of a target: of prompts, a tree, its accepted path, and plain steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from longdraft.memory.windows import WindowKVCache
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from tests.support.forwards import forward

TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
DEPTHS = [0, 1, 1, 2]


def outputs(runner: TargetRunner, prompts: Mapping[int, int], steps: int) -> list[torch.Tensor]:
    """Logits, taps and all KV entries of two sequences of different lengths, in slots 2 and 0."""
    store = runner.new_store(3, 200)
    for slot, n in prompts.items():
        forward(runner, [[(7 * i + slot) % 60 for i in range(n)]], store, [slot], logits="none", is_prefill=True)
        store.commit(slot, range(n))
    full = runner.kv_shape.layers
    taps = Taps(hidden=(0, 2), queries=(0, full - 1) if full else ())
    mask, depths = TREE.expand(2, -1, -1), [DEPTHS, DEPTHS]
    tree = forward(runner, [[5, 6, 7, 8], [9, 10, 11, 12]], store, [2, 0], mask=mask, depths=depths, taps=taps)
    found = [tree.logits, *tree.hidden.values(), *tree.queries.values()]
    store.commit(2, [0, 1, 3])
    store.commit(0, [])
    for token in range(steps):
        found.append(forward(runner, [[token], [token + 1]], store, [2, 0]).logits)
        store.commit(2, [0])
        store.commit(0, [0])
    rows = store.lengths[2]
    for cache in (store, *(states for states in store.states if isinstance(states, WindowKVCache))):
        found += [cache.keys[:, 2, :, :rows], cache.values[:, 2, :, :rows]]
    return found
