"""Our trees as SGLang's verification takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longdraft.trees.tree import TokenTree


def tree_arrays(trees: Sequence[TokenTree], nodes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Tokens (B * nodes,) and flat ancestor masks (B * nodes * nodes,) of a batch, of one size each.

    Row ``i`` of a tree's mask names the nodes that node ``i`` attends to: its ancestors, and itself. From that SGLang
    derives positions, first children and next siblings. Nodes that fill up a smaller tree attend to themselves alone:
    they have no parent, so nothing leads to them and they are never accepted.

    Raises:
        ValueError: a tree has more nodes.
    """
    tokens = np.zeros((len(trees), nodes), np.int64)
    mask = np.zeros((len(trees), nodes, nodes), bool)
    mask[:, range(nodes), range(nodes)] = True
    for tree, token, seen in zip(trees, tokens, mask, strict=True):
        if tree.size > nodes:
            raise ValueError(f"a tree of {tree.size} nodes where {nodes} are verified")
        token[: tree.size] = tree.tokens
        for node, parent in enumerate(tree.parents[1:], 1):
            seen[node] |= seen[parent]
    return tokens.reshape(-1), mask.reshape(-1)
