"""Our trees in the arrays of SGLang's verification."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longdraft.trees.tree import TokenTree


def tree_arrays(trees: Sequence[TokenTree], nodes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Tokens (B * nodes,) and flat ancestor masks (B * nodes * nodes,) of a batch; smaller trees are padded.

    Row ``i`` of a tree's mask marks the nodes that node ``i`` attends to: its ancestors, and itself. SGLang derives
    positions, first children and next siblings from it. Padding attends to itself only: it has no parent, so nothing
    leads to it and it is never accepted.

    Raises:
        ValueError: a tree has more than ``nodes`` nodes.
    """
    tokens = np.zeros((len(trees), nodes), np.int64)
    mask = np.zeros((len(trees), nodes, nodes), bool)
    mask[:, range(nodes), range(nodes)] = True
    for tree, token, attended in zip(trees, tokens, mask, strict=True):
        if tree.size > nodes:
            raise ValueError(f"a tree of {tree.size} nodes where {nodes} are verified")
        token[: tree.size] = tree.tokens
        for node, parent in enumerate(tree.parents[1:], 1):
            attended[node] |= attended[parent]
    return tokens.reshape(-1), mask.reshape(-1)
