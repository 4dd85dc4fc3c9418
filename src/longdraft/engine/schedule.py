"""Schedules: how a round's trees are verified. The default verifies each on the whole cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from longdraft.engine.accept import Accepted
from longdraft.engine.event import Event, Mode
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.outputs import NO_TAPS, Taps, TargetOutput
from longdraft.model.runner import TargetRunner
from longdraft.trees.masks import tree_block
from longdraft.trees.tree import TokenTree
from longdraft.views.view import View


@dataclass
class Verified:
    """A drafted tree with the target's logits, ready to be walked.

    Attributes:
        sequence: the tree's root is its last token.
        logits: (at least tree.size, vocabulary), the target's.
        mode: what the logits were computed on.
        queries: layer -> (query heads, at least tree.size, head size) of the nodes, after RoPE, for the layers that
            were given to :meth:`Schedule.open`.
    """

    sequence: Sequence
    tree: TokenTree
    logits: torch.Tensor
    mode: Mode = "full"
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def event(self, accepted: Accepted, replaced: int | None = None) -> Event:
        """The event of a walk."""
        path, tokens = accepted.path, accepted.tokens
        queries = {layer: q[:, path[-1] : path[-1] + 1] for layer, q in self.queries.items()}
        return Event(self.sequence, self.tree, len(tokens) - 1, path, tokens, self.mode, queries, replaced)


class Schedule:
    """Verifies every tree on the whole cache: exact, whatever is drafted.

    Attributes:
        exact: it emits what the target alone would have emitted.
        views: views of longer texts by partial verifications; empty if every verification sees all rows.
    """

    exact = True
    views: tuple[View, ...] = ()

    def extra_rows(self, max_nodes: int) -> int:
        """Rows that a slot needs behind prompt, output and tree."""
        return 0

    def open(self, runner: TargetRunner, store: KVStore, max_nodes: int, query_layers: tuple[int, ...] = ()) -> None:
        """Called before anything else, and again when the store has been replaced.

        Args:
            max_nodes: most drafted nodes of a tree.
            query_layers: layers of the target whose queries every :class:`Verified` shall bring.

        Raises:
            MemoryBudgetError: what it needs beside the store does not fit.
        """
        self.runner, self.store, self.query_layers = runner, store, query_layers

    def length(self, sequence: Sequence) -> int:
        """Rows of KV that a round usually reads of a sequence."""
        return sequence.length

    def verify(self, sequences: list[Sequence], trees: list[TokenTree]) -> list[Verified]:
        """Computes the target's logits of a tree for each sequence; commits nothing.

        Args:
            trees: rooted at the last tokens.
        """
        return self.verified(sequences, trees, self.forward(trees, sequences, Taps(queries=self.query_layers)))

    def verified(
        self, sequences: list[Sequence], trees: list[TokenTree], out: TargetOutput, mode: Mode = "full"
    ) -> list[Verified]:
        """The trees with what a forward over them says of each."""
        assert out.logits is not None
        return [
            Verified(s, tree, out.logits[b], mode, {layer: out.queries[layer][b] for layer in self.query_layers})
            for b, (s, tree) in enumerate(zip(sequences, trees, strict=True))
        ]

    def forward(
        self, trees: list[TokenTree], sequences: list[Sequence], taps: Taps = NO_TAPS, last: int | None = None
    ) -> TargetOutput:
        """Runs one full forward of a batch of trees, padded to the largest; ``last``: as of the target's ``verify``."""
        block = tree_block(self.store, [s.slot for s in sequences], trees)
        return self.runner.verify(block, self.store, taps, last)

    def commit(self, verified: Verified, accepted: Accepted) -> Event:
        """Keeps the KV rows of the accepted path, and returns what became of the sequence."""
        self.store.commit(verified.sequence.slot, accepted.path)
        return verified.event(accepted)

    def close(self, sequence: Sequence) -> None:
        """Called when a sequence has finished: its slot keeps exact rows alone."""


def verify_trees(
    runner: TargetRunner,
    store: KVStore,
    slots: list[int],
    trees: list[TokenTree],
    bases: list[int] | None = None,
    taps: Taps = NO_TAPS,
) -> TargetOutput:
    """Runs one forward over a tree a slot, padded to the largest. Writes KV behind the slots' rows, uncommitted.

    Logits are not checked for NaN here: whoever walks the trees does that, and waits for the device once.
    """
    return runner.forward(tree_block(store, slots, trees, bases), store, taps=taps, check=False)
