"""Trees of given continuations: a chain, the union of several, two trees in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from longdraft.trees.tree import TokenTree


def chain(root: int, tokens: Sequence[int]) -> TokenTree:
    """Makes a tree of one continuation."""
    return TokenTree((root, *tokens), tuple(range(-1, len(tokens))))


def union(root: int, paths: Iterable[Sequence[int]], log_probs: Sequence[Sequence[float]] | None = None) -> TokenTree:
    """Makes the prefix tree of several continuations: shared beginnings are verified once.

    Args:
        paths: continuations of the root.
        log_probs: for each path, of each of its tokens given those before; the first path that has a node decides.
    """
    tokens, parents, chances = [root], [-1], [0.0]
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    for path, path_chances in zip(paths, log_probs or repeat(()), strict=False):
        node = 0
        for token, log_prob in zip(path, path_chances or repeat(0.0), strict=False):
            key = (node, token)
            if key not in nodes:
                nodes[key] = len(tokens)
                tokens.append(token)
                parents.append(node)
                chances.append(log_prob)
            node = nodes[key]
    return TokenTree(tuple(tokens), tuple(parents), tuple(chances) if log_probs else ())


def merged(first: TokenTree, second: TokenTree) -> TokenTree:
    """Merges two trees on the same root; a node that both have gets the larger probability."""
    if not second.drafted or not first.drafted:
        return first if first.drafted else second
    tokens, parents = list(first.tokens), list(first.parents)
    log_probs = list(first.log_probs or (0.0,) * first.size)
    nodes = {(parents[i], tokens[i]): i for i in reversed(range(1, first.size))}
    places = [0]  # of the second tree's nodes in the merged one
    for node in range(1, second.size):
        key = (places[second.parents[node]], second.tokens[node])
        log_prob = second.log_probs[node] if second.log_probs else 0.0
        if key in nodes:
            log_probs[nodes[key]] = max(log_probs[nodes[key]], log_prob)
        else:
            nodes[key] = len(tokens)
            tokens.append(key[1])
            parents.append(key[0])
            log_probs.append(log_prob)
        places.append(nodes[key])
    looked_up = first.looked_up | {places[node] for node in second.looked_up}
    forced = first.forced | {places[node] for node in second.forced}
    return TokenTree(tuple(tokens), tuple(parents), tuple(log_probs), looked_up, forced)
