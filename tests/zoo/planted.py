"""A drafter that knows what the target will write, and plants mistakes: every round rejects something."""

from __future__ import annotations

from longdraft.engine.drafter import Drafter
from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import NodeLimit, TokenTree


class Planted(Drafter):
    """Proposes trees with up to three right tokens among wrong ones, and chains that break off.

    Args:
        texts: prompt -> what the target writes after it.
        vocabulary: number of tokens.
    """

    max_nodes = 10

    def __init__(self, texts: dict[tuple[int, ...], list[int]], vocabulary: int) -> None:
        self._texts, self._vocabulary = texts, vocabulary

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        return [self._tree(sequence) for sequence in sequences]

    def _tree(self, sequence: Sequence) -> TokenTree:
        done = len(sequence.output)
        tokens, parents = [sequence.tokens[-1]], [-1]

        def add(token: int, parent: int) -> int:
            tokens.append(token % self._vocabulary)
            parents.append(parent)
            return len(tokens) - 1

        node, right = 0, (done + len(sequence.prompt)) % 4  # how many right tokens come before the mistake
        for depth, token in enumerate(self._texts[tuple(sequence.prompt)][done : done + 3]):
            if done % 3:  # a wrong branch comes first, so that the rows of accepted nodes have to move
                add(token + 9, add(token + 1 + depth, node))
            if depth == right:
                add(token + 2 + depth, node)
                break
            node = add(token, node)
        return TokenTree(tuple(tokens), tuple(parents))
