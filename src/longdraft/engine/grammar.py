"""Drafting under a grammar: forced tokens are drafted without cost (jump-forward), forbidden ones are not verified.

A JSON schema allows only one continuation at keys, punctuation and constants. These forced tokens are added to the
tree of any drafter, and the tree is verified as usual. The output equals that of plain decoding with the grammar.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from math import log
from typing import Any, Protocol, runtime_checkable

from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import NodeLimit, TokenTree

# Pruning and planning assume this draft probability for a token of Grammar.likely_tokens that no drafter proposed.
LIKELY_TOKEN_PROBABILITY = 0.9


@runtime_checkable
class Grammar(Protocol):
    """A logits processor with a grammar state, which is advanced along drafted tokens and rolled back."""

    def advance_to(self, output: SequenceOf[int]) -> None:
        """Advances the state to the end of ``output``, the sequence's tokens after the prompt."""

    def forced_tokens(self) -> list[int]:
        """Returns the next tokens as far as the grammar allows only one; empty if it allows several next tokens."""

    def likely_tokens(self) -> list[int]:
        """Returns likely next tokens where the grammar allows several; may be empty."""

    def accept_token(self, token: int) -> bool:
        """Advances by ``token``. Returns False without advancing if the token is forbidden or ends the output."""

    def rollback(self, count: int) -> None:
        """Undoes the last ``count`` calls of :meth:`accept_token`."""


def fit_to_grammar(tree: TokenTree, sequence: Sequence, max_nodes: int) -> TokenTree:
    """Adds the forced tokens of a sequence's grammar to the drafted tree, and drops forbidden nodes.

    Returns the best ``max_nodes`` drafted nodes of the new tree; ``tree`` itself if the sequence has no grammar.
    """
    grammar = next((p for p in sequence.sampler.processors if isinstance(p, Grammar)), None)
    if grammar is None or max_nodes < 1:
        return tree
    grammar.advance_to(sequence.output)
    fitted = _GrammarTree(tree, grammar, max_nodes)
    fitted.grow(0, 0)
    tokens, parents, logprobs = zip(*fitted.nodes, strict=True)
    lookup_nodes, forced_nodes = frozenset(fitted.lookup_nodes), frozenset(fitted.forced_nodes)
    return TokenTree(tokens, parents, logprobs, lookup_nodes, forced_nodes).keep_best(max_nodes)


def with_forced_tokens(limit: NodeLimit, max_nodes: int) -> NodeLimit:
    """Returns a copy of ``limit`` whose ``select_sequences`` first adds the forced tokens to each tree."""

    def select_sequences(sequences: list[Any], trees: list[TokenTree]) -> list[Any]:
        fitted_trees = [fit_to_grammar(tree, s, max_nodes) for s, tree in zip(sequences, trees, strict=True)]
        return limit.select_sequences(sequences, fitted_trees)

    return replace(limit, select_sequences=select_sequences)


class _GrammarTree:
    """Builds the fitted tree.

    Attributes:
        nodes: (token, parent, logprob) of each node, parents first.
        lookup_nodes: nodes that a suffix lookup proposed.
        forced_nodes: nodes with a forced token.
    """

    def __init__(self, drafted: TokenTree, grammar: Grammar, max_nodes: int) -> None:
        self.drafted, self.grammar, self.max_nodes = drafted, grammar, max_nodes
        self.nodes = [(drafted.tokens[0], -1, 0.0)]
        self.lookup_nodes, self.forced_nodes = set[int](), set[int]()

    def grow(self, fitted_node: int, drafted_node: int | None) -> None:
        """Adds the nodes below ``fitted_node``. The caller has advanced the grammar to this node; the call restores it.

        ``drafted_node`` is the node of the drafted tree with the same path; None if that path was not drafted.
        """
        if len(self.nodes) >= self.drafted.size + self.max_nodes:
            return  # every drafted node and max_nodes more: enough for keep_best to choose from
        num_advanced = 0
        for token in self.grammar.forced_tokens()[: self.max_nodes]:
            drafted_node = None if drafted_node is None else self.drafted.child(drafted_node, token)
            fitted_node = self._add(token, fitted_node, drafted_node, forced=True)
            if not self.grammar.accept_token(token):  # the token ends the output
                break
            num_advanced += 1
        else:  # the output has not ended: continue after the forced tokens
            if num_advanced:
                self.grow(fitted_node, drafted_node)
            else:
                self._add_branches(fitted_node, drafted_node)
        self.grammar.rollback(num_advanced)

    def _add_branches(self, fitted_node: int, drafted_node: int | None) -> None:
        """Adds the drafted children that the grammar allows, and the likely tokens."""
        children = {} if drafted_node is None else self.drafted.children(drafted_node)
        for token in dict.fromkeys([*children, *self.grammar.likely_tokens()]):
            if self.grammar.accept_token(token):
                child = children.get(token)
                self.grow(self._add(token, fitted_node, child), child)
                self.grammar.rollback(1)

    def _add(self, token: int, parent: int, drafted_node: int | None, forced: bool = False) -> int:
        """Adds a node, and returns its index. A forced token has probability 1, so logprob 0."""
        fitted_node, logprob = len(self.nodes), log(LIKELY_TOKEN_PROBABILITY)
        if forced:
            self.forced_nodes.add(fitted_node)
            logprob = 0.0
        elif drafted_node is not None:
            logprob = self.drafted.logprobs[drafted_node] if self.drafted.logprobs else 0.0
        if drafted_node is not None and drafted_node in self.drafted.lookup_nodes:
            self.lookup_nodes.add(fitted_node)
        self.nodes.append((token, parent, logprob))
        return fitted_node
