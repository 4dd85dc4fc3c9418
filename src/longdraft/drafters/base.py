"""What a drafter is."""

from __future__ import annotations

from typing import Protocol

from longdraft.sequence import Sequence
from longdraft.trees.tree import TokenTree


class Drafter(Protocol):
    """Proposes continuations. It is called for all active sequences together, so a neural one can batch.

    A drafter may be wrong at will: it decides how fast decoding is, never what comes out.
    """

    max_nodes: int
    """Largest number of drafted nodes of any tree; the cache keeps this much scratch space."""

    def prefill(self, sequence: Sequence) -> None:
        """Told once a sequence, when its prompt has been read and its first token emitted."""

    def propose(self, sequences: list[Sequence]) -> list[TokenTree]:
        """A tree for each sequence, rooted at its last emitted token."""

    def observe(self, sequence: Sequence, tree: TokenTree, accepted: int) -> None:
        """Told after each verification; the emitted tokens are already in the sequence.

        Args:
            accepted: how many drafted tokens were right.
        """

    def release(self, sequence: Sequence) -> None:
        """Told when a sequence has finished."""


class NoDrafter:
    """Drafts nothing: a tree of the root alone, which is autoregressive decoding."""

    max_nodes = 0

    def prefill(self, sequence: Sequence) -> None:
        pass

    def propose(self, sequences: list[Sequence]) -> list[TokenTree]:
        return [TokenTree((s.output[-1],), (-1,)) for s in sequences]

    def observe(self, sequence: Sequence, tree: TokenTree, accepted: int) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass
