"""Trees on the device: the same nodes and the same path as those that the host chooses."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.engine.accept import accept_path
from longdraft.trees.device_trees import choose_nodes
from longdraft.trees.level import LevelExpander, root_level
from longdraft.trees.tree_config import TreeConfig, beam, chain, dynamic, static

VOCABULARY = 12
SHAPES = st.sampled_from([beam((3, 4, 2)), beam((2, 5), nodes=4), dynamic(4, 3, 9), static((2, 2, 2)), chain(5)])


def grower(seed: int, nan: bool) -> LevelExpander:
    """Drafts random children, some of equal probability, or NaN."""
    generator = torch.Generator().manual_seed(seed)

    def logits_or_topk(level, k):
        size = (*level.tokens.shape, VOCABULARY)
        logits = torch.randint(-2, 3, size, generator=generator).float()
        logits[..., 0] = float("nan") if nan else 0.0
        values, tokens = logits.topk(k, dim=-1)
        return values - logits.logsumexp(-1, keepdim=True), tokens

    return LevelExpander(logits_or_topk)


@settings(max_examples=60)
@given(
    shape=SHAPES,
    seed=st.integers(0, 10_000),
    depths=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    nan=st.booleans(),
)
def test_the_device_chooses_and_accepts_what_the_host_does(
    shape: TreeConfig, seed: int, depths: list[int], nan: bool
) -> None:
    roots = [seed % VOCABULARY] * len(depths)
    all_levels = [shape.depth] * len(depths)
    levels = shape.grow_levels(root_level(roots, "cpu"), grower(seed, nan), all_levels)
    chosen = choose_nodes(root_level(roots, "cpu"), levels, shape.max_nodes, torch.tensor(depths))
    targets = torch.randint(VOCABULARY, chosen.tokens.shape, generator=torch.Generator().manual_seed(seed))
    paths = chosen.accepted_paths(targets, shape.depth).tolist()
    # The host drafts levels up to the limit only. Whether a tree is grown deeper changes no random number before.
    for i, most in enumerate(depths):
        tree = shape.grow(roots, grower(seed, nan), all_levels)[i] if most >= shape.depth else None
        size = sum(depth <= most for depth in chosen.depths[i].tolist())
        assert chosen.depths[i].tolist() == sorted(chosen.depths[i].tolist())
        if tree is None:  # nodes that are deeper than the limit come last, and only where others are missing
            assert size == min(chosen.tokens.shape[1], 1 + sum(x.tokens.shape[1] for x in levels[:most]))
            continue
        assert tree.tokens == tuple(chosen.tokens[i].tolist())
        assert tree.parents == (-1, *chosen.parents[i, 1:].tolist())
        assert tree.depths == tuple(chosen.depths[i].tolist())
        sampler = SimpleNamespace(processors=(), greedy=True)
        accepted = accept_path(tree, None, sampler, list, target_tokens=targets[i].tolist())
        num_accepted = len(accepted.nodes)
        assert paths[i] == [*accepted.nodes, *range(num_accepted, shape.depth + 1)]
