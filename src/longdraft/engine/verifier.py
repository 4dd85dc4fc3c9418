"""Verifiers: how a round's trees are verified. The default verifies on the full KV cache."""

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
    """A drafted tree with the target's logits: the input of acceptance.

    Attributes:
        sequence: its last token is the tree's root.
        logits: (at least tree.size, vocabulary), the target's.
        mode: the KV that the logits were computed with.
        queries: layer -> (query heads, at least tree.size, head size), after RoPE, for :attr:`Verifier.query_layers`.
    """

    sequence: Sequence
    tree: TokenTree
    logits: torch.Tensor
    mode: RoundMode = "full"
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def round_result(self, accepted: AcceptedPath, kv_rewritten_from: int | None = None) -> RoundResult:
        """Returns the result of the round, given the accepted path."""
        path, tokens = accepted.nodes, accepted.token_ids
        queries = {layer: q[:, path[-1] : path[-1] + 1] for layer, q in self.queries.items()}
        return RoundResult(
            self.sequence, self.tree, len(tokens) - 1, path, tokens, self.mode, queries, kv_rewritten_from
        )


class Verifier:
    """Verifies trees on the full KV cache: exact for any draft.

    Attributes:
        exact: whether the output is that of the target alone.
        views: the views of partial verification; empty if all verification is full.
        query_layers: target layers whose queries each :class:`VerifyOutput` has.
    """

    exact = True
    views: tuple[View, ...] = ()

    def num_extra_entries(self, max_nodes: int) -> int:
        """Returns the KV entries that a slot needs beyond prompt, output and tree."""
        return 0

    def bind(self, runner: TargetRunner, store: KVStore, max_nodes: int, query_layers: tuple[int, ...] = ()) -> None:
        """Called before anything else, and again when the store was replaced.

        Args:
            max_nodes: most drafted nodes of a tree.

        Raises:
            MemoryBudgetError: the verifier's own memory does not fit.
        """
        self.runner, self.store, self.query_layers = runner, store, query_layers

    def kv_len(self, sequence: Sequence) -> int:
        """Returns the KV entries that a round usually reads of a sequence."""
        return sequence.length

    def verify(self, sequences: list[Sequence], trees: list[TokenTree]) -> list[VerifyOutput]:
        """Computes the target's logits on a tree for each sequence, rooted at its last token. Commits nothing."""
        return self.split_output(sequences, trees, self.forward(trees, sequences, Taps(queries=self.query_layers)))

    def split_output(
        self, sequences: list[Sequence], trees: list[TokenTree], out: TargetOutput, mode: RoundMode = "full"
    ) -> list[VerifyOutput]:
        """Splits the output of a batched forward into one for each tree."""
        assert out.logits is not None
        return [
            VerifyOutput(s, tree, out.logits[b], mode, {layer: out.queries[layer][b] for layer in self.query_layers})
            for b, (s, tree) in enumerate(zip(sequences, trees, strict=True))
        ]

    def forward(
        self, trees: list[TokenTree], sequences: list[Sequence], taps: Taps = NO_TAPS, num_logits: int | None = None
    ) -> TargetOutput:
        """Runs one forward on trees, padded to the largest; returns the last ``num_logits`` logits, or all."""
        batch = make_tree_batch(self.store, [s.slot for s in sequences], trees)
        return self.runner.verify(batch, self.store, taps, num_logits)

    def commit(self, output: VerifyOutput, accepted: AcceptedPath) -> RoundResult:
        """Commits the KV of the accepted path, and returns the result of the round."""
        self.store.commit(output.sequence.slot, accepted.nodes)
        return output.round_result(accepted)

    def release(self, sequence: Sequence) -> None:
        """Called when a sequence has finished. Its slot keeps exact KV only."""


def verify_trees(
    runner: TargetRunner,
    store: KVStore,
    slots: list[int],
    trees: list[TokenTree],
    root_positions: list[int] | None = None,
    taps: Taps = NO_TAPS,
) -> TargetOutput:
    """Runs one forward on a tree for each slot, padded to the largest. Its KV is written, but not committed.

    Logits are not checked for NaN here. Acceptance does that, with its one copy to the host.
    """
    return runner.forward(make_tree_batch(store, slots, trees, root_positions), store, taps=taps, check_nan=False)
