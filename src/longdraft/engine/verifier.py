"""Schedules: how a round's trees are verified. The default verifies each on the whole cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from longdraft.engine.accept import AcceptedPath
from longdraft.engine.round_result import RoundMode, RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.outputs import NO_TAPS, Taps, TargetOutput
from longdraft.model.runner import TargetRunner
from longdraft.trees.masks import make_tree_batch
from longdraft.trees.tree import TokenTree
from longdraft.views.view import View


@dataclass
class VerifyOutput:
    """A drafted tree with the target's logits, ready to be walked.

    Attributes:
        sequence: the tree's root is its last token.
        logits: (at least tree.size, vocabulary), the target's.
        mode: what the logits were computed on.
        queries: layer -> (query heads, at least tree.size, head size) of the nodes, after RoPE, for the layers that
            were given to :meth:`Verifier.bind`.
    """

    sequence: Sequence
    tree: TokenTree
    logits: torch.Tensor
    mode: RoundMode = "full"
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def round_result(self, accepted: AcceptedPath, kv_rewritten_from: int | None = None) -> RoundResult:
        """The event of a walk."""
        path, tokens = accepted.nodes, accepted.token_ids
        queries = {layer: q[:, path[-1] : path[-1] + 1] for layer, q in self.queries.items()}
        return RoundResult(
            self.sequence, self.tree, len(tokens) - 1, path, tokens, self.mode, queries, kv_rewritten_from
        )


class Verifier:
    """Verifies every tree on the whole cache: exact, whatever is drafted.

    Attributes:
        exact: it emits what the target alone would have emitted.
        views: views of longer texts by partial verifications; empty if every verification sees all rows.
    """

    exact = True
    views: tuple[View, ...] = ()

    def num_extra_entries(self, max_nodes: int) -> int:
        """Rows that a slot needs behind prompt, output and tree."""
        return 0

    def bind(self, runner: TargetRunner, store: KVStore, max_nodes: int, query_layers: tuple[int, ...] = ()) -> None:
        """Called before anything else, and again when the store has been replaced.

        Args:
            max_nodes: most drafted nodes of a tree.
            query_layers: layers of the target whose queries every :class:`VerifyOutput` shall bring.

        Raises:
            MemoryBudgetError: what it needs beside the store does not fit.
        """
        self.runner, self.store, self.query_layers = runner, store, query_layers

    def kv_len(self, sequence: Sequence) -> int:
        """Rows of KV that a round usually reads of a sequence."""
        return sequence.length

    def verify(self, sequences: list[Sequence], trees: list[TokenTree]) -> list[VerifyOutput]:
        """Computes the target's logits of a tree for each sequence; commits nothing.

        Args:
            trees: rooted at the last tokens.
        """
        return self.split_output(sequences, trees, self.forward(trees, sequences, Taps(queries=self.query_layers)))

    def split_output(
        self, sequences: list[Sequence], trees: list[TokenTree], out: TargetOutput, mode: RoundMode = "full"
    ) -> list[VerifyOutput]:
        """The trees with what a forward over them says of each."""
        assert out.logits is not None
        return [
            VerifyOutput(s, tree, out.logits[b], mode, {layer: out.queries[layer][b] for layer in self.query_layers})
            for b, (s, tree) in enumerate(zip(sequences, trees, strict=True))
        ]

    def forward(
        self, trees: list[TokenTree], sequences: list[Sequence], taps: Taps = NO_TAPS, num_logits: int | None = None
    ) -> TargetOutput:
        """Runs one full forward of a batch of trees, padded to the largest; ``num_logits``: as of the target's ``verify``."""
        block = make_tree_batch(self.store, [s.slot for s in sequences], trees)
        return self.runner.verify(block, self.store, taps, num_logits)

    def commit(self, output: VerifyOutput, accepted: AcceptedPath) -> RoundResult:
        """Keeps the KV rows of the accepted path, and returns what became of the sequence."""
        self.store.commit(output.sequence.slot, accepted.nodes)
        return output.round_result(accepted)

    def release(self, sequence: Sequence) -> None:
        """Called when a sequence has finished: its slot keeps exact rows alone."""


def verify_trees(
    runner: TargetRunner,
    store: KVStore,
    slots: list[int],
    trees: list[TokenTree],
    root_positions: list[int] | None = None,
    taps: Taps = NO_TAPS,
) -> TargetOutput:
    """Runs one forward over a tree a slot, padded to the largest. Writes KV behind the slots' rows, uncommitted.

    Logits are not checked for NaN here: whoever walks the trees does that, and waits for the device once.
    """
    return runner.forward(make_tree_batch(store, slots, trees, root_positions), store, taps=taps, check_nan=False)
