"""Token trees: drafted continuations that one target forward verifies together."""

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
    """A tree of draft tokens under a root that is already emitted.

    Node 0 is the root: the last emitted token, whose KV the target has not computed yet. Every other node is a draft
    token. A parent always comes before its children.

    Attributes:
        tokens: token id of each node.
        parents: index of each node's parent; -1 for the root only.
        logprobs: the drafter's log-probability of each node given its ancestors; empty if the drafter has none.
        lookup_nodes: nodes that a suffix lookup proposed, and not a draft model; for display.
        forced_nodes: nodes that are accepted if their parents are, because a grammar forbids every other token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    lookup_nodes: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    forced_nodes: frozenset[int] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree needs a parent for each token: {self.size} tokens, {len(self.parents)} parents")
        if self.parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(self.parents) if i):
            raise ValueError(f"parents must precede their children, and only node 0 may be a root: {self.parents}")
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise ValueError(f"a tree of {self.size} nodes needs as many log-probabilities, got {len(self.logprobs)}")

    @property
    def size(self) -> int:
        """Number of nodes, the root included."""
        return len(self.tokens)

    @property
    def num_draft_tokens(self) -> int:
        """Number of nodes without the root."""
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
        """The drafter's log-probability of each node's path from the root; zeros if the drafter has none."""
        sums = [0.0] * self.size
        for node in range(1, self.size if self.logprobs else 0):
            sums[node] = sums[self.parents[node]] + self.logprobs[node]
        return tuple(sums)

    @cached_property
    def is_chain(self) -> bool:
        """True if no node has two children, so that the tree's attention mask is causal."""
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @cached_property
    def _children(self) -> tuple[dict[int, int], ...]:
        """For each node, {token: child node}. If two children have the same token, only the first is in it."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent >= 0:
                children[parent].setdefault(token, node)
        return tuple(children)

    def child(self, node: int, token: int) -> int | None:
        """Returns the child of ``node`` with this token, or None."""
        return self._children[node].get(token)

    def children(self, node: int) -> dict[int, int]:
        """Returns {token: child node} of ``node``."""
        return self._children[node]

    def match_length(self, tokens: Sequence[int]) -> int:
        """Returns the length of the longest prefix of ``tokens`` that is a path from the root."""
        node: int | None = 0
        for length, token in enumerate(tokens):
            node = self.child(node or 0, token)
            if node is None:
                return length
        return len(tokens)

    def path(self, node: int) -> list[int]:
        """Returns the nodes from the root to ``node``, both included."""
        nodes = [node]
        while (node := self.parents[node]) >= 0:
            nodes.append(node)
        return nodes[::-1]

    def with_prefix(self, tokens: Sequence[int]) -> TokenTree:
        """Returns the tree with a chain of tokens before its root. The first of these tokens is the new root."""
        if not tokens:
            return self
        offset = len(tokens)
        return TokenTree(
            (*tokens, *self.tokens),
            (*range(-1, offset), *(parent + offset for parent in self.parents[1:])),
            (0.0,) * offset + self.logprobs if self.logprobs else (),
            frozenset(i + offset for i in self.lookup_nodes),
            frozenset(i + offset for i in self.forced_nodes),
        )

    def limit_depth(self, max_depth: int) -> TokenTree:
        """Returns the tree without nodes deeper than ``max_depth``."""
        if not self.num_draft_tokens or max(self.depths) <= max_depth:
            return self
        return self._select([i for i, depth in enumerate(self.depths) if depth <= max_depth])

    def keep_best(self, max_nodes: int) -> TokenTree:
        """Returns the tree of the ``max_nodes`` draft nodes with the largest path log-probabilities."""
        if self.num_draft_tokens <= max_nodes:
            return self
        logprobs = self.path_logprobs
        # The result contains each node's parent: no child has a larger path log-probability, and the sort is stable.
        ranked = sorted(range(1, self.size), key=lambda i: -logprobs[i])
        return self._select([0, *sorted(ranked[:max_nodes])])

    def best_path(self) -> TokenTree:
        """Returns the path with the largest expected accepted length, as a chain."""
        expected_lengths = [0.0] * self.size  # of the path to each node: the sum of path probabilities along the path
        for node in range(1, self.size):
            expected_lengths[node] = expected_lengths[self.parents[node]] + exp(self.path_logprobs[node])
        return self._select(self.path(max(range(self.size), key=expected_lengths.__getitem__)))

    def _select(self, nodes: Sequence[int]) -> TokenTree:
        """Returns the tree of some nodes. ``nodes`` must be ascending, and contain the parent of each node."""
        new_index = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        return TokenTree(
            tuple(self.tokens[i] for i in nodes),
            tuple(new_index[self.parents[i]] for i in nodes),
            tuple(self.logprobs[i] for i in nodes) if self.logprobs else (),
            frozenset(new_index[i] for i in nodes if i in self.lookup_nodes),
            frozenset(new_index[i] for i in nodes if i in self.forced_nodes),
        )


def root_tree(root: int) -> TokenTree:
    """Makes the tree of a root alone: nothing is drafted."""
    return TokenTree((root,), (-1,))


def chain_tree(root: int, tokens: Sequence[int], logprobs: Sequence[float] = ()) -> TokenTree:
    """Makes the tree of one continuation. ``logprobs``: log-probability of each token, given the tokens before it."""
    return TokenTree((root, *tokens), tuple(range(-1, len(tokens))), (0.0, *logprobs) if logprobs else ())


def tree_from_paths(
    root: int, paths: Iterable[Sequence[int]], logprobs: Iterable[Sequence[float]] = repeat(())
) -> TokenTree:
    """Makes the prefix tree of several continuations, so that a shared prefix is verified once.
    ``logprobs``: for each path, the log-probabilities of its tokens, given the tokens before."""
    return merge_trees(root_tree(root), *(chain_tree(root, *path) for path in zip(paths, logprobs, strict=False)))


def merge_trees(first: TokenTree, *others: TokenTree) -> TokenTree:
    """Merges trees with the same root. A node in several trees gets the largest of its log-probabilities there."""
    nonempty = [tree for tree in (first, *others) if tree.num_draft_tokens]
    if len(nonempty) < 2:
        return nonempty[0] if nonempty else first
    tokens, parents, lookup_nodes, forced_nodes = [first.tokens[0]], [-1], set[int](), set[int]()
    logprobs, merged_nodes = [0.0], dict[tuple[int, int], int]()  # {(parent, token): node of the merged tree}
    for tree in nonempty:
        new_index = [0]  # for each node of this tree, its index in the merged tree
        for node in range(1, tree.size):
            parent, token = key = new_index[tree.parents[node]], tree.tokens[node]
            logprob = tree.logprobs[node] if tree.logprobs else 0.0
            if key in merged_nodes:
                logprobs[merged_nodes[key]] = max(logprobs[merged_nodes[key]], logprob)
            else:
                merged_nodes[key] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                logprobs.append(logprob)
            new_index.append(merged_nodes[key])
        lookup_nodes |= {new_index[node] for node in tree.lookup_nodes}
        forced_nodes |= {new_index[node] for node in tree.forced_nodes}
    return TokenTree(tuple(tokens), tuple(parents), tuple(logprobs), frozenset(lookup_nodes), frozenset(forced_nodes))


# (sequences, the tree that a lookup proposed for each) -> the sequences for which the draft model is worth running.
SelectSequences = Callable[[list[Any], list[TokenTree]], list[Any]]


def _select_all(sequences: list[Any], trees: list[TokenTree]) -> list[Any]:
    return sequences


@dataclass(frozen=True)
class NodeLimit:
    """A planner's upper bounds on the trees that a drafter grows in one round.

    Attributes:
        max_nodes: maximum number of draft nodes of a tree that can be worth verifying.
        min_expected_gain: expected accepted tokens that one more level must add to be worth its draft forward.
        select_sequences: chooses the sequences to run the draft model for, given the trees that lookups proposed.
    """

    max_nodes: int
    min_expected_gain: float
    select_sequences: SelectSequences = _select_all


# With this limit, a drafter's tree is the largest that a planner may ask for. Scratch memory is allocated for its size.
NO_LIMIT = NodeLimit(max_nodes=sys.maxsize, min_expected_gain=0.0)
