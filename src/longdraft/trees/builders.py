"""Builders of trees that need no scores: a chain, a static shape, the union of some continuations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from longdraft.trees.tree import TokenTree


def chain(root: int, tokens: Sequence[int]) -> TokenTree:
    """One continuation."""
    return TokenTree((root, *tokens), tuple(range(-1, len(tokens))))


def static(root: int, candidates: Sequence[Sequence[int]], widths: Sequence[int]) -> TokenTree:
    """The cross product of per-depth candidates, in a fixed shape.

    Args:
        candidates: for each depth, token ids, the best first (what parallel heads predict).
        widths: how many of them every node of the previous depth gets as children, e.g. ``[3, 2, 1]``.
    """
    tokens, parents = [root], [-1]
    level = [0]
    for options, width in zip(candidates, widths, strict=False):
        following: list[int] = []
        for parent in level:
            for token in options[:width]:
                following.append(len(tokens))
                tokens.append(token)
                parents.append(parent)
        level = following
    return TokenTree(tuple(tokens), tuple(parents))


def union(
    root: int,
    paths: Iterable[Sequence[int]],
    max_nodes: int | None = None,
    log_probs: Sequence[Sequence[float]] | None = None,
) -> TokenTree:
    """The prefix tree of several continuations: what they share is verified once.

    Args:
        paths: continuations of the root, the most promising first.
        max_nodes: stop when the tree has this many drafted nodes.
        log_probs: for each path, of each of its tokens given those before; the first path that has a node says its.
    """
    tokens, parents = [root], [-1]
    chances = [0.0]
    children: dict[tuple[int, int], int] = {}
    for path, chance in zip(paths, log_probs or repeat(()), strict=False):
        node = 0
        for token, log_prob in zip(path, chance or repeat(0.0), strict=False):
            key = (node, token)
            if key not in children:
                if max_nodes is not None and len(tokens) > max_nodes:
                    return TokenTree(tuple(tokens), tuple(parents), tuple(chances) if log_probs else ())
                children[key] = len(tokens)
                tokens.append(token)
                parents.append(node)
                chances.append(log_prob)
            node = children[key]
    return TokenTree(tuple(tokens), tuple(parents), tuple(chances) if log_probs else ())


def merged(first: TokenTree, second: TokenTree) -> TokenTree:
    """Two trees on the same root in one; of a node that both have, the larger probability counts."""
    if not second.drafted or not first.drafted:
        return first if first.drafted else second
    looked_up = first.looked_up
    tokens, parents = list(first.tokens), list(first.parents)
    log_probs = list(first.log_probs or (0.0,) * first.size)
    known = {(parents[i], tokens[i]): i for i in reversed(range(1, first.size))}
    place = [0]  # of the second tree's nodes in the whole
    for node in range(1, second.size):
        key = (place[second.parents[node]], second.tokens[node])
        log_prob = second.log_probs[node] if second.log_probs else 0.0
        if key in known:
            log_probs[known[key]] = max(log_probs[known[key]], log_prob)
        else:
            known[key] = len(tokens)
            tokens.append(key[1])
            parents.append(key[0])
            log_probs.append(log_prob)
        place.append(known[key])
    looked_up |= {place[node] for node in second.looked_up}
    return TokenTree(tuple(tokens), tuple(parents), tuple(log_probs), looked_up)
