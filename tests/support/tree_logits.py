"""The contract of a hosted model: logits of a tree's or chain's token equal those of plain decoding to the bit, in any
batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from tests.support.forwards import forward

CHUNK = 32


def random_tokens(length: int, seed: int = 0, vocabulary: int = 60) -> list[int]:
    return torch.randint(2, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill(runner: TargetRunner, store: KVStore, slot: int, prompt: list[int]) -> None:
    """Prefills a prompt in chunks, as the engine does."""
    for start in range(0, len(prompt), CHUNK):
        piece = prompt[start : start + CHUNK]
        forward(runner, [piece], store, [slot], logits="none", is_prefill=True)
        store.commit(slot, range(len(piece)))


def plain_logits(runner: TargetRunner, prompt: list[int], path: list[int]) -> torch.Tensor:
    """(len(path), vocabulary) logits of tokens that are decoded one by one."""
    store, rows = runner.new_store(1, len(prompt) + len(path) + 8), []
    prefill(runner, store, 0, prompt)
    for token in path:
        rows.append(forward(runner, [[token]], store, [0]).logits[0, 0])
        store.commit(0, [0])
    return torch.stack(rows)


def tree_with_siblings(path: list[int]) -> tuple[list[int], torch.Tensor, list[int]]:
    """Tokens, mask and depths of a tree with two nodes a token: the token, and a sibling that no later node sees."""
    size = 2 * len(path)
    mask = torch.zeros(1, size, size, dtype=torch.bool)
    for i in range(size):
        mask[0, i, i] = True
        mask[0, i, : i if i % 2 == 0 else max(0, i - 1) : 2] = True
    return [each for token in path for each in (token, token + 1)], mask, [i // 2 for i in range(size)]


def check_tree_logits(
    runner: TargetRunner,
    same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal,
    lengths: tuple[int, int] = (70, 5),
) -> torch.Tensor:
    """Checks two sequences in shuffled slots: trees in one forward and level by level, commits, further steps, chains.

    Returns:
        The logits of plain decoding of the longer sequence.
    """
    slots, prompts, paths = (2, 0), [random_tokens(n, n) for n in lengths], [random_tokens(7, seed) for seed in (3, 4)]
    plain = [plain_logits(runner, prompt, path) for prompt, path in zip(prompts, paths, strict=True)]
    store = runner.new_store(3, max(lengths) + 30)
    for slot, prompt in zip(slots, prompts, strict=True):
        prefill(runner, store, slot, prompt)
    done = [0, 0]
    for accepted in ((3, 1), (1, 2)):
        trees = [tree_with_siblings(path[at : at + 3]) for path, at in zip(paths, done, strict=True)]
        tokens, depths, mask = [t for t, _, _ in trees], [d for _, _, d in trees], torch.cat([m for _, m, _ in trees])
        whole = forward(runner, tokens, store, slots, mask=mask, depths=depths).logits
        levels = []
        for start, end in ((0, 1), (1, 4), (4, 6)):
            cut = {"mask": mask[:, start:end, :end], "depths": [d[start:end] for d in depths], "tree_offset": start}
            levels.append(forward(runner, [t[start:end] for t in tokens], store, slots, **cut).logits)
        for found in (whole, torch.cat(levels, 1)):
            for b in (0, 1):
                assert same(found[b, ::2], plain[b][done[b] : done[b] + 3]), "a tree's rows are not the plain ones"
        for b, count in enumerate(accepted):  # rejected nodes must leave no trace
            store.commit(slots[b], range(0, 2 * count, 2))
            done[b] += count
        order = (1, 0)
        chains = [[*paths[b][done[b] : done[b] + 2], 1] for b in order]
        found = forward(runner, chains, store, [slots[b] for b in order]).logits
        for row, b in enumerate(order):
            assert same(found[row, :2], plain[b][done[b] : done[b] + 2]), "a chain's rows are not the plain ones"
            store.commit(slots[b], [0])
            done[b] += 1
    for b, slot in enumerate(slots):
        after = forward(runner, [[paths[b][done[b]]]], store, [slot]).logits[0, 0]
        assert same(after, plain[b][done[b]]), "a step behind a tree is not the plain one"
    return plain[0]
