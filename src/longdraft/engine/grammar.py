"""Drafting under a grammar: forced tokens are drafted without cost (jump-forward), forbidden ones are not verified.

A JSON schema leaves one continuation for keys, punctuation and constants. These tokens are added to every drafter's
tree, which is verified as usual. The output is that of plain decoding with the same grammar, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from math import log
from typing import Any, Protocol, runtime_checkable

from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import NodeLimit, TokenTree

# Draft probability of a token that the grammar suggests but does not force.
SUGGESTED_PROBABILITY = 0.9


@runtime_checkable
class Grammar(Protocol):
    """A logits processor with a grammar state that can look ahead. The state is after the last token so far."""

    def advance_to(self, output: SequenceOf[int]) -> None:
        """Advances the state to the end of ``output``, all tokens after the prompt."""

    def forced_tokens(self) -> list[int]:
        """Returns the next tokens, as far as each is the only one allowed."""

    def likely_tokens(self) -> list[int]:
        """Returns likely next tokens, if several are allowed; mostly none."""

    def accept_token(self, token: int) -> bool:
        """Advances by a token. Returns False, without advancing, if it is forbidden or ends the output."""

    def rollback(self, count: int) -> None:
        """Undoes the last ``count`` calls of :meth:`accept_token`."""


def fit_to_grammar(tree: TokenTree, sequence: Sequence, max_nodes: int) -> TokenTree:
    """Fits a sequence's drafted tree to its grammar, if it has one.

    Args:
        max_nodes: most drafted nodes.

    Returns:
        The tree with the grammar's forced tokens at its nodes, and without forbidden ones.
    """
    grammar = next((p for p in sequence.sampler.processors if isinstance(p, Grammar)), None)
    if grammar is None or max_nodes < 1 or sequence.finish_reason is not None:
        return tree
    grammar.advance_to(sequence.output)
    fitted = _GrammarTree(tree, grammar, max_nodes)
    fitted.grow(0, 0)
    tokens, parents, logprobs = zip(*fitted.nodes, strict=True)
    node_sets = frozenset(fitted.lookup_nodes), frozenset(fitted.forced)
    return TokenTree(tokens, parents, logprobs, *node_sets).keep_best(max_nodes)


def count_forced_tokens(limit: NodeLimit, max_nodes: int) -> NodeLimit:
    """Makes ``limit`` count forced tokens among the proposals that cost nothing."""

    def select_sequences(sequences: list[Any], trees: list[TokenTree]) -> list[Any]:
        fitted = [fit_to_grammar(tree, s, max_nodes) for s, tree in zip(sequences, trees, strict=True)]
        return limit.select_sequences(sequences, fitted)

    return replace(limit, select_sequences=select_sequences)


class _GrammarTree:
    """Builds the fitted tree: ``nodes`` are (token, parent, logprob), in order."""

    def __init__(self, drafted: TokenTree, grammar: Grammar, max_nodes: int) -> None:
        self.drafted, self.grammar, self.max_nodes = drafted, grammar, max_nodes
        self.nodes = [(drafted.tokens[0], -1, 0.0)]
        self.lookup_nodes, self.forced = set[int](), set[int]()

    def grow(self, index: int, node: int | None) -> None:
        """Adds the continuations of a node. The grammar state is after this node, before and after the call.

        Args:
            index: the node in the fitted tree.
            node: the same node in the drafted tree; None if it is not there.
        """
        if len(self.nodes) >= self.drafted.size + self.max_nodes:
            return
        num_accepted = 0
        for token in self.grammar.forced_tokens()[: self.max_nodes]:
            node = None if node is None else self.drafted.child(node, token)
            index = self._add(token, index, node, forced=True)
            if not self.grammar.accept_token(token):  # the output ends here
                break
            num_accepted += 1
        else:
            if num_accepted:
                self.grow(index, node)
            else:
                self._add_branches(index, node)
        self.grammar.rollback(num_accepted)

    def _add_branches(self, index: int, node: int | None) -> None:
        """Adds drafted children that are allowed, and likely tokens."""
        children = {} if node is None else self.drafted.children(node)
        for token in dict.fromkeys([*children, *self.grammar.likely_tokens()]):
            if self.grammar.accept_token(token):
                child = children.get(token)
                self.grow(self._add(token, index, child), child)
                self.grammar.rollback(1)

    def _add(self, token: int, parent: int, node: int | None, forced: bool = False) -> int:
        index, logprob = len(self.nodes), log(SUGGESTED_PROBABILITY)
        if forced:
            self.forced.add(index)
            logprob = 0.0
        elif node is not None:
            logprob = self.drafted.logprobs[node] if self.drafted.logprobs else 0.0
        if node is not None and node in self.drafted.lookup_nodes:
            self.lookup_nodes.add(index)
        self.nodes.append((token, parent, logprob))
        return index
