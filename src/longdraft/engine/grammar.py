"""Drafting under a grammar: forced tokens are drafted without cost (jump-forward), forbidden ones are not verified.

At keys, punctuation and constants a JSON schema allows only one continuation. These forced tokens are added to the
tree of any drafter, and the tree is verified as usual. The output equals that of plain decoding with the grammar.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from math import log
from typing import Any, Protocol, runtime_checkable

from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import NodeLimit, TokenTree

# Draft probability assumed for a token that the grammar suggests but does not force, for pruning and planning.
SUGGESTED_PROBABILITY = 0.9


@runtime_checkable
class Grammar(Protocol):
    """A logits processor with a grammar state, which is advanced along drafted tokens and rolled back."""

    def advance_to(self, output: SequenceOf[int]) -> None:
        """Advances the state to the end of ``output``, the sequence's tokens after the prompt."""

    def forced_tokens(self) -> list[int]:
        """Returns the next tokens, up to the first place where several are allowed."""

    def likely_tokens(self) -> list[int]:
        """Returns likely next tokens where several are allowed; may be empty."""

    def accept_token(self, token: int) -> bool:
        """Advances by a token. Returns False, and stays, if the token is forbidden or ends the output."""

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
    lookup_nodes, forced_nodes = frozenset(fitted.lookup_nodes), frozenset(fitted.forced_nodes)
    return TokenTree(tokens, parents, logprobs, lookup_nodes, forced_nodes).keep_best(max_nodes)


def count_forced_tokens(limit: NodeLimit, max_nodes: int) -> NodeLimit:
    """Returns ``limit`` with forced tokens added to the trees by which it selects the sequences to draft for."""

    def select_sequences(sequences: list[Any], trees: list[TokenTree]) -> list[Any]:
        fitted = [fit_to_grammar(tree, s, max_nodes) for s, tree in zip(sequences, trees, strict=True)]
        return limit.select_sequences(sequences, fitted)

    return replace(limit, select_sequences=select_sequences)


class _GrammarTree:
    """Builds the fitted tree. ``nodes`` has (token, parent, logprob) of each node, parents first."""

    def __init__(self, drafted: TokenTree, grammar: Grammar, max_nodes: int) -> None:
        self.drafted, self.grammar, self.max_nodes = drafted, grammar, max_nodes
        self.nodes = [(drafted.tokens[0], -1, 0.0)]
        self.lookup_nodes, self.forced_nodes = set[int](), set[int]()

    def grow(self, fitted_node: int, drafted_node: int | None) -> None:
        """Adds the continuations of a node. The grammar state is after this node, before and after the call.

        Args:
            fitted_node: the node in the fitted tree.
            drafted_node: the node in the drafted tree; None if it was not drafted.
        """
        if len(self.nodes) >= self.drafted.size + self.max_nodes:
            return  # bounds the work; keep_best chooses among these nodes
        num_accepted = 0
        for token in self.grammar.forced_tokens()[: self.max_nodes]:
            drafted_node = None if drafted_node is None else self.drafted.child(drafted_node, token)
            fitted_node = self._add(token, fitted_node, drafted_node, forced=True)
            if not self.grammar.accept_token(token):  # the output ends here
                break
            num_accepted += 1
        else:  # the output has not ended: continue behind the forced tokens
            if num_accepted:
                self.grow(fitted_node, drafted_node)
            else:
                self._add_branches(fitted_node, drafted_node)
        self.grammar.rollback(num_accepted)

    def _add_branches(self, fitted_node: int, drafted_node: int | None) -> None:
        """Adds drafted children that the grammar allows, and likely tokens."""
        children = {} if drafted_node is None else self.drafted.children(drafted_node)
        for token in dict.fromkeys([*children, *self.grammar.likely_tokens()]):
            if self.grammar.accept_token(token):
                child = children.get(token)
                self.grow(self._add(token, fitted_node, child), child)
                self.grammar.rollback(1)

    def _add(self, token: int, parent: int, drafted_node: int | None, forced: bool = False) -> int:
        fitted_node, logprob = len(self.nodes), log(SUGGESTED_PROBABILITY)
        if forced:
            self.forced_nodes.add(fitted_node)
            logprob = 0.0
        elif drafted_node is not None:
            logprob = self.drafted.logprobs[drafted_node] if self.drafted.logprobs else 0.0
        if drafted_node is not None and drafted_node in self.drafted.lookup_nodes:
            self.lookup_nodes.add(fitted_node)
        self.nodes.append((token, parent, logprob))
        return fitted_node
