"""Logits of a path, token by token and as every other row of a tree."""

from __future__ import annotations

import torch

from longdraft.model.runner import TargetRunner


def text(length: int, seed: int = 0, vocabulary: int = 60) -> list[int]:
    return torch.randint(2, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_and_tree(runner: TargetRunner, prompt: list[int], path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows (len(path), vocabulary) of both. A path's rows do not see the siblings between them."""
    (store, plain), size = (_read(runner, prompt), list[torch.Tensor]()), 2 * len(path)
    for token in path:
        plain.append(runner.forward(store.block([0], [[token]]), store).logits[0, 0])
        store.commit(0, [0])
    mask = torch.zeros(1, size, size, dtype=torch.bool)
    for i in range(size):
        mask[0, i, i] = True
        mask[0, i, : i if i % 2 == 0 else max(0, i - 1) : 2] = True
    tokens = [each for token in path for each in (token, token + 1)]
    store = _read(runner, prompt)
    block = store.block([0], [tokens], depths=[[i // 2 for i in range(size)]], mask=mask)
    return torch.stack(plain), runner.forward(block, store).logits[0, ::2]


def _read(runner, prompt):
    store = runner.new_store(1, len(prompt) + 64)
    runner.forward(store.block([0], [prompt], prompt=True), store, logits="none")
    store.commit(0, range(len(prompt)))
    return store
