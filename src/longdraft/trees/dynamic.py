"""Dynamic tree: wide where the draft hesitates, deep where it is sure (EAGLE-2, section 4; EAGLE-3 keeps it).

The root's ``top_k`` most probable tokens are the first level. Each round shows the draft the ``top_k`` best nodes of
the last level and takes ``top_k`` children of each: all of them are candidates. What is verified are the best
candidates of all levels by cumulative log-probability, which are closed under parents, for a score only falls along a
path. The last level is never shown to the draft.

It differs from a beam tree in what it may keep: a child that is not shown to the draft can be verified all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from longdraft.trees.beam import Expand, Scored, best_nodes, best_of, children, root_level, trees
from longdraft.trees.tree import TokenTree

# The papers' 60 nodes count the root, which ``nodes`` does not.
DEPTH, TOP_K, NODES = 7, 10, 59


def dynamic(
    roots: Sequence[int],
    expand: Expand,
    depth: int = DEPTH,
    top_k: int = TOP_K,
    depths: Sequence[int] | None = None,
    *,
    nodes: int | None = NODES,
    ids: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> list[TokenTree]:
    """A dynamic tree for each sequence of a batch.

    Args:
        roots: token id of each root.
        expand: the draft. Called with the roots, then with the nodes of each level but the last that go on.
        depth: levels, and so calls of the draft.
        top_k: nodes of a level that go on, and children of each.
        depths: levels of each sequence's tree, at most ``depth``, 0 for a root alone; None: all.
        nodes: drafted nodes of a tree, the root not counted; None: all candidates.
        ids: (draft vocabulary,) target id of each draft id; None: they are the same.
        device: where the draft's logits are.
    """
    depths = [depth] * len(roots) if depths is None else depths
    shown = root_level(roots, device)
    # (B', W): where the shown nodes stand among the candidates of their level.
    places = shown.level.parents
    pool: list[Scored] = []
    for done in range(depth):
        if not (rows := [r for r in shown.level.rows if depths[r] > done]):
            break
        places = torch.stack([places[shown.level.rows.index(r)] for r in rows])
        shown = shown.kept(rows)
        candidates = children(shown, expand(shown.level), top_k, ids)
        level = candidates.level
        pool.append(replace(candidates, level=replace(level, parents=places.gather(1, level.parents))))
        shown, places = best_of(candidates, top_k)
    return [best_nodes(tree, nodes) for tree in trees(roots, pool)]
