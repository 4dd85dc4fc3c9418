"""Finished trees on the device: the choice of nodes and the accepted path, as functions of tensors of fixed shapes.

A CUDA graph can capture these functions, because the host reads no number. Elsewhere the host does the same with
:class:`~longdraft.trees.tree.TokenTree`. Shapes: B sequences, N nodes of each tree, the root first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longdraft.trees.level import TreeLevel


@dataclass(frozen=True)
class DeviceTrees:
    """A tree of N nodes for each of B sequences. A parent always comes before its children.

    Attributes:
        tokens: (B, N) target ids.
        parents: (B, N) index of each node's parent; 0 for the root too.
        logprobs: float32 (B, N) log-probability of each node given the path to its parent.
        mask: (B, N, N) bool: [b, i, j] is True if node j is node i or an ancestor of it.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    logprobs: torch.Tensor
    mask: torch.Tensor

    @property
    def depths(self) -> torch.Tensor:
        """(B, N) number of ancestors of each node."""
        return self.mask.sum(-1) - 1

    def accepted_paths(self, target_tokens: torch.Tensor, depth: int) -> torch.Tensor:
        """Walks down each tree along the target's tokens, as :func:`~longdraft.engine.accept.accept_path` does.

        Args:
            target_tokens: (B, N) the target's token at each node.
            depth: the number D of the tree's levels.

        Returns:
            (B, D + 1) the nodes of the accepted path, root first. Behind the path, index i stands at place i.
        """
        is_rejected = self.tokens != target_tokens.gather(1, self.parents)
        is_rejected[:, 0] = False
        is_accepted = ~(self.mask & is_rejected[:, None]).any(-1)
        places = torch.arange(is_accepted.shape[1], device=is_accepted.device)
        # Accepted nodes are one path, so sorted indices are in path order.
        path = torch.where(is_accepted, places, len(places)).sort(-1).values[:, : depth + 1]
        return torch.where(path < len(places), path, places[: depth + 1])


def choose_nodes(
    roots: TreeLevel, levels: Sequence[TreeLevel], max_nodes: int, max_depths: torch.Tensor
) -> DeviceTrees:
    """Joins levels to trees. A tree keeps the ``max_nodes`` draft nodes with the largest path log-probabilities, and
    nodes that are deeper than ``max_depths`` (B,) only if there are no others. Nodes are ordered by depth."""
    all_levels = [roots, *levels]
    tokens, logprobs = (torch.cat([getattr(x, name) for x in all_levels], dim=1) for name in ("tokens", "logprobs"))
    parents, level_start = [roots.parents], 0
    for before, level in zip(all_levels, levels, strict=False):
        parents.append(level.parents + level_start)  # was an index in the level before
        level_start += before.tokens.shape[1]
    joined = torch.cat(parents, dim=1)
    if tokens.shape[1] > max_nodes + 1:
        too_deep = (max_depths < level.depth for level in all_levels)
        ranked = zip(all_levels, too_deep, strict=True)
        path_logprobs = torch.cat([x.path_logprobs.masked_fill(deep[:, None], -torch.inf) for x, deep in ranked], dim=1)
        # As in TokenTree.keep_best: parents are among the best, because the sort is stable.
        best = path_logprobs.sort(dim=1, descending=True, stable=True).indices[:, : max_nodes + 1].sort(dim=1).values
        tokens, logprobs, joined = (x.gather(1, best) for x in (tokens, logprobs, joined))
        joined = torch.searchsorted(best, joined)
    return DeviceTrees(tokens, joined, logprobs, _ancestor_mask(joined, len(levels)))


def _ancestor_mask(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """Returns (B, N, N) bool: each node sees itself and its ancestors, of which it has up to ``depth``."""
    num_nodes = parents.shape[1]
    nodes = torch.arange(num_nodes, device=parents.device)
    mask = (nodes[:, None] == nodes) | (parents[..., None] == nodes)  # itself and its parent
    reach = 1
    while reach < depth:  # ancestors of ancestors, by matrix products
        mask = mask.float() @ mask.float() > 0
        reach *= 2
    return mask
