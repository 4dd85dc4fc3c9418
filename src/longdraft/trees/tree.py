"""Token trees: drafted continuations that one forward verifies together; how they are made, and a planner's limit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from math import exp
from typing import Any


@dataclass(frozen=True)
class TokenTree:
    """A tree of drafted tokens under a root that is already decided.

    Node 0 is the root: the last emitted token, whose KV the target has not computed yet. Every other node is a drafted
    token. A parent always comes before its children.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent; -1 for the root, and for it alone.
        logprobs: the drafter's log-probability of each node given its path, 0.0 if it has none; empty: it has none.
        lookup_nodes: nodes that a lookup proposed, not a draft; for display.
        forced_nodes: nodes that are right if their parents are, as a grammar forbids every other token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    lookup_nodes: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    forced_nodes: frozenset[int] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens and {len(self.parents)} parents")
        if self.parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(self.parents) if i):
            raise ValueError(f"parents must precede their children and only node 0 is a root: {self.parents}")
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise ValueError(f"{len(self.logprobs)} log-probabilities for {len(self.tokens)} nodes")

    @property
    def size(self) -> int:
        """Nodes, the root included."""
        return len(self.tokens)

    @property
    def num_draft_tokens(self) -> int:
        """Drafted nodes: all but the root."""
        return len(self.tokens) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node, 0 for the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def path_logprobs(self) -> tuple[float, ...]:
        """The drafter's log-probability of each node's path from the root; 0.0 if it gives none."""
        scores = [0.0] * self.size
        for node in range(1, self.size if self.logprobs else 0):
            scores[node] = scores[self.parents[node]] + self.logprobs[node]
        return tuple(scores)

    @cached_property
    def is_chain(self) -> bool:
        """True if no node has two children: the causal mask serves."""
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @cached_property
    def _children(self) -> tuple[dict[int, int], ...]:
        """For each node, its children by token; the first of two equal ones counts."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent >= 0:
                children[parent].setdefault(token, node)
        return tuple(children)

    def child(self, node: int, token: int) -> int | None:
        """Returns the child of ``node`` with this token; None if there is none."""
        return self._children[node].get(token)

    def children(self, node: int) -> dict[int, int]:
        """Returns the children of ``node`` by token."""
        return self._children[node]

    def match_length(self, tokens: Sequence[int]) -> int:
        """Counts how many of these tokens, from the first on, are a path from the root."""
        node: int | None = 0
        for count, token in enumerate(tokens):
            node = self.child(node or 0, token)
            if node is None:
                return count
        return len(tokens)

    def path(self, node: int) -> list[int]:
        """Returns the nodes from the root to ``node``, both included."""
        nodes = [node]
        while (node := self.parents[node]) >= 0:
            nodes.append(node)
        return nodes[::-1]

    def with_prefix(self, tokens: Sequence[int]) -> TokenTree:
        """Returns the tree with a chain of tokens before its root, the first of them the new root."""
        if not tokens:
            return self
        n = len(tokens)
        return TokenTree(
            (*tokens, *self.tokens),
            (*range(-1, n), *(parent + n for parent in self.parents[1:])),
            (0.0,) * n + self.logprobs if self.logprobs else (),
            frozenset(i + n for i in self.lookup_nodes),
            frozenset(i + n for i in self.forced_nodes),
        )

    def limit_depth(self, max_depth: int) -> TokenTree:
        """Returns the tree without nodes deeper than ``max_depth``."""
        if not self.num_draft_tokens or max(self.depths) <= max_depth:
            return self
        kept = [i for i, depth in enumerate(self.depths) if depth <= max_depth]
        return self._only(kept)

    def keep_best(self, max_nodes: int) -> TokenTree:
        """Returns the tree of the best drafted nodes by cumulative log-probability; it is closed under parents."""
        if self.num_draft_tokens <= max_nodes:
            return self
        scores = self.path_logprobs
        # A child never scores above its parent; of equal ones the parent comes first, for sorting keeps their order.
        return self._only([0, *sorted(sorted(range(1, self.size), key=lambda i: -scores[i])[:max_nodes])])

    def best_path(self) -> TokenTree:
        """Returns the chain, down to a leaf, with the most tokens that are expected to be accepted."""
        expected = [0.0] * self.size
        for node in range(1, self.size):
            expected[node] = expected[self.parents[node]] + exp(self.path_logprobs[node])
        return self._only(self.path(max(range(self.size), key=expected.__getitem__)))

    def _only(self, kept: Sequence[int]) -> TokenTree:
        """Returns the tree of these nodes, which are in order and closed under parents."""
        new = {old: i for i, old in enumerate(kept)} | {-1: -1}
        return TokenTree(
            tuple(self.tokens[i] for i in kept),
            tuple(new[self.parents[i]] for i in kept),
            tuple(self.logprobs[i] for i in kept) if self.logprobs else (),
            frozenset(new[i] for i in kept if i in self.lookup_nodes),
            frozenset(new[i] for i in kept if i in self.forced_nodes),
        )


def chain_tree(root: int, tokens: Sequence[int], logprobs: Sequence[float] = ()) -> TokenTree:
    """Makes a tree of one continuation; ``logprobs``: of its tokens, given those before."""
    return TokenTree((root, *tokens), tuple(range(-1, len(tokens))), (0.0, *logprobs) if logprobs else ())


def tree_from_paths(
    root: int, paths: Iterable[Sequence[int]], logprobs: Iterable[Sequence[float]] = repeat(())
) -> TokenTree:
    """Makes the prefix tree of several continuations: shared beginnings are verified once.

    Args:
        logprobs: for each path, as of :func:`chain_tree`.
    """
    return merge_trees(chain_tree(root, ()), *(chain_tree(root, *each) for each in zip(paths, logprobs, strict=False)))


def merge_trees(first: TokenTree, *others: TokenTree) -> TokenTree:
    """Merges trees on the same root; a node that several have gets the largest probability."""
    drafted = [tree for tree in (first, *others) if tree.num_draft_tokens]
    if len(drafted) < 2:
        return drafted[0] if drafted else first
    tokens, parents, looked_up, forced = [first.tokens[0]], [-1], set[int](), set[int]()
    logprobs, nodes = [0.0], dict[tuple[int, int], int]()  # (parent, token) -> node
    for tree in drafted:
        places = [0]  # of its nodes in the merged tree
        for node in range(1, tree.size):
            key = places[tree.parents[node]], tree.tokens[node]
            logprob = tree.logprobs[node] if tree.logprobs else 0.0
            if key in nodes:
                logprobs[nodes[key]] = max(logprobs[nodes[key]], logprob)
            else:
                nodes[key] = len(tokens)
                tokens.append(key[1])
                parents.append(key[0])
                logprobs.append(logprob)
            places.append(nodes[key])
        looked_up |= {places[node] for node in tree.lookup_nodes}
        forced |= {places[node] for node in tree.forced_nodes}
    return TokenTree(tuple(tokens), tuple(parents), tuple(logprobs), frozenset(looked_up), frozenset(forced))


# (sequences, a tree for each that cost nothing) -> the sequences for which forwards of the draft are worthwhile.
SelectSequences = Callable[[list[Any], list[TokenTree]], list[Any]]


def _all(sequences: list[Any], trees: list[TokenTree]) -> list[Any]:
    return sequences


@dataclass(frozen=True)
class NodeLimit:
    """Bounds of the trees that a drafter grows in one round; it may stay below them.

    Attributes:
        max_nodes: drafted nodes of a tree that can be worth verifying.
        min_expected_gain: cost of one more draft forward in expected tokens: a level that promises less is not worthwhile.
        select_sequences: selects the sequences to draft for by forwards, given what is proposed without.
    """

    max_nodes: int
    min_expected_gain: float
    select_sequences: SelectSequences = _all


# A kind fitted to this limit is as large as a planner may ever want it; memory is taken for that.
NO_LIMIT = NodeLimit(max_nodes=sys.maxsize, min_expected_gain=0.0)
