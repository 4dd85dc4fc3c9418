"""Drafts of texts that are bound to a grammar: what it forces is drafted for nothing, what it forbids is not verified.

A JSON schema leaves one continuation for keys, punctuation and constants. Those tokens join every drafter's tree, which
is verified as ever: the text is that of plain decoding with the same grammar, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from math import log
from typing import Any, Protocol, runtime_checkable

from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import NodeLimit, TokenTree

# The drafter's probability of a token that the grammar suggests but does not force.
LIKELY = 0.9


@runtime_checkable
class Grammar(Protocol):
    """A logits processor that forbids tokens, and can look ahead. It stands behind the last token of the text."""

    def advance_to(self, output: SequenceOf[int]) -> None:
        """Moves on to the end of the text. ``output``: all tokens behind the prompt."""

    def forced_tokens(self) -> list[int]:
        """The next tokens, as long as every other one is forbidden."""

    def likely_tokens(self) -> list[int]:
        """Next tokens that are likely, where several are allowed; mostly none."""

    def accept_token(self, token: int) -> bool:
        """Moves on by a token. Returns False, without moving, if it is forbidden or ends the text."""

    def rollback(self, count: int) -> None:
        """Takes back so many calls of :meth:`accept_token`."""


def fit_to_grammar(tree: TokenTree, sequence: Sequence, max_nodes: int) -> TokenTree:
    """Fits a sequence's drafted tree to its grammar, if it has one.

    Args:
        most: drafted nodes at most.

    Returns:
        The tree with the tokens that the grammar forces at its nodes, without those that it forbids.
    """
    grammar = next((p for p in sequence.sampler.processors if isinstance(p, Grammar)), None)
    if grammar is None or max_nodes < 1 or sequence.finish_reason is not None:
        return tree
    grammar.advance_to(sequence.output)
    fit = _Fit(tree, grammar, max_nodes)
    fit.grow(0, 0)
    tokens, parents, logprobs = zip(*fit.nodes, strict=True)
    return TokenTree(tokens, parents, logprobs, frozenset(fit.looked_up), frozenset(fit.forced)).keep_best(max_nodes)


def count_forced_tokens(limit: NodeLimit, max_nodes: int) -> NodeLimit:
    """The limit of a round, where what grammars force counts among the proposals that cost nothing."""

    def select_sequences(sequences: list[Any], trees: list[TokenTree]) -> list[Any]:
        fit = [fit_to_grammar(tree, s, max_nodes) for s, tree in zip(sequences, trees, strict=True)]
        return limit.select_sequences(sequences, fit)

    return replace(limit, select_sequences=select_sequences)


class _Fit:
    """The tree that grows, beside the one that was drafted: (token, parent, log-probability) of each node."""

    def __init__(self, drafted: TokenTree, grammar: Grammar, most: int) -> None:
        self.drafted, self.grammar, self.most = drafted, grammar, most
        self.nodes = [(drafted.tokens[0], -1, 0.0)]
        self.looked_up, self.forced = set[int](), set[int]()

    def grow(self, place: int, node: int | None) -> None:
        """Adds what may follow a node. The grammar stands behind it, and does so again afterwards.

        Args:
            node: the same node in the drafted tree; None if it is not there.
        """
        if len(self.nodes) >= self.drafted.size + self.most:
            return
        followed = 0
        for token in self.grammar.forced_tokens()[: self.most]:
            node = None if node is None else self.drafted.child(node, token)
            place = self._add(token, place, node, forced=True)
            if not self.grammar.accept_token(token):  # nothing comes behind the text's end
                break
            followed += 1
        else:
            if followed:
                self.grow(place, node)
            else:
                self._fork(place, node)
        self.grammar.rollback(followed)

    def _fork(self, place: int, node: int | None) -> None:
        """Adds what was drafted behind a node and is allowed, and what is likely."""
        children = {} if node is None else self.drafted.children(node)
        for token in dict.fromkeys([*children, *self.grammar.likely_tokens()]):
            if self.grammar.accept_token(token):
                child = children.get(token)
                self.grow(self._add(token, place, child), child)
                self.grammar.rollback(1)

    def _add(self, token: int, parent: int, node: int | None, forced: bool = False) -> int:
        place, logprob = len(self.nodes), log(LIKELY)
        if forced:
            self.forced.add(place)
            logprob = 0.0
        elif node is not None:
            logprob = self.drafted.logprobs[node] if self.drafted.logprobs else 0.0
        if node is not None and node in self.drafted.lookup_nodes:
            self.looked_up.add(place)
        self.nodes.append((token, parent, logprob))
        return place
