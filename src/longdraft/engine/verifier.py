"""The verifier runs the target on a round's trees. The default verifier reads the full KV cache."""

from __future__ import annotations

from dataclasses import dataclass

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
    """A tree with the target's logits. :func:`~longdraft.engine.accept.accept_path` accepts a path of the tree.

    Attributes:
        sequence: the sequence to which the tree belongs.
        tree: the drafted tree. Its root is the sequence's last token.
        logits: (at least tree.size, vocabulary) the target's raw logits of the nodes, then of padding; empty if there
            are ``target_tokens``.
        maxima: (at least tree.size,) the largest logit of each node, and its token.
        queries: layer -> (query heads, at least tree.size, head size), after RoPE, for the drafter's query layers.
        mode: the kind of forward, see :data:`~longdraft.engine.round_result.RoundMode`.
        target_tokens: the target's token at each node, if a CUDA graph ran the whole round. It has also moved the KV of
            the accepted path into place.
    """

    sequence: Sequence
    tree: TokenTree
    logits: torch.Tensor
    maxima: tuple[torch.Tensor, torch.Tensor]
    queries: dict[int, torch.Tensor]
    mode: RoundMode = "full"
    target_tokens: list[int] | None = None

    def round_result(self, accepted: AcceptedPath, kv_rewritten_from: int | None = None) -> RoundResult:
        """Returns the result of the round, with the queries of the deepest accepted node."""
        path, tokens, last = accepted.nodes, accepted.token_ids, accepted.nodes[-1]
        queries = {layer: q[:, last : last + 1] for layer, q in self.queries.items()}
        return RoundResult(
            self.sequence, self.tree, len(tokens) - 1, path, tokens, self.mode, queries, kv_rewritten_from
        )


class Verifier:
    """Verifies trees on the full KV cache, which is exact for any draft. :meth:`bind` sets ``runner`` and ``store``.

    Attributes:
        exact: whether the output is that of plain decoding.
        views: the views of partial KV caches that verifications attend to; empty if every verification is full.
    """

    exact = True
    views: tuple[View, ...] = ()

    def num_extra_entries(self, max_nodes: int) -> int:
        """Returns the number of KV entries that a slot needs in addition to prompt, output and tree."""
        return 0

    def bind(self, runner: TargetRunner, store: KVStore, max_nodes: int) -> None:
        """Called before the first verification, and again when the KV store was replaced. A tree has at most
        ``max_nodes`` drafted nodes.

        Raises:
            MemoryBudgetError: a KV cache of the verifier does not fit the free memory.
        """
        self.runner, self.store = runner, store

    def kv_len(self, sequence: Sequence) -> int:
        """Returns the number of a sequence's KV entries that a round usually reads."""
        return sequence.length

    def verify(
        self, sequences: list[Sequence], trees: list[TokenTree], query_layers: tuple[int, ...] = ()
    ) -> list[VerifyOutput]:
        """Computes the target's logits at the nodes of each sequence's tree, and the queries of some layers, without
        committing KV."""
        return split_output(sequences, trees, self.forward(trees, sequences, Taps(queries=query_layers)), query_layers)

    def forward(
        self, trees: list[TokenTree], sequences: list[Sequence], taps: Taps = NO_TAPS, num_logits: int | None = None
    ) -> TargetOutput:
        """Runs one forward on trees, padded to the largest tree. Computes the logits of the last ``num_logits`` tokens
        of the padded trees; None: of all tokens."""
        batch = make_tree_batch(self.store, [s.slot for s in sequences], trees)
        return self.runner.verify(batch, self.store, taps, num_logits)

    def commit(self, output: VerifyOutput, accepted: AcceptedPath) -> RoundResult:
        """Commits the KV of the accepted path, and returns the result of the round."""
        is_moved = output.target_tokens is not None
        self.store.commit(output.sequence.slot, range(len(accepted.nodes)) if is_moved else accepted.nodes)
        return output.round_result(accepted)

    def release(self, sequence: Sequence) -> None:
        """Drops the approximate KV of a sequence that has finished, so the slot keeps only exact KV."""


def split_output(
    sequences: list[Sequence],
    trees: list[TokenTree],
    out: TargetOutput,
    query_layers: tuple[int, ...],
    mode: RoundMode = "full",
) -> list[VerifyOutput]:
    """Splits the output of a forward on all trees into a :class:`VerifyOutput` for each tree."""
    assert out.logits is not None
    row_max, argmax = out.logits.max(-1)  # of all trees in one kernel
    outputs = []
    for b, (s, tree) in enumerate(zip(sequences, trees, strict=True)):
        queries = {layer: out.queries[layer][b] for layer in query_layers}
        outputs.append(VerifyOutput(s, tree, out.logits[b], (row_max[b], argmax[b]), queries, mode))
    return outputs


def verify_trees(
    runner: TargetRunner,
    store: KVStore,
    slots: list[int],
    trees: list[TokenTree],
    root_positions: list[int] | None = None,
    taps: Taps = NO_TAPS,
) -> TargetOutput:
    """Runs one forward on a tree for each slot, padded to the largest tree. The KV is written to scratch entries.
    Logits are not checked for NaN here, because :func:`~longdraft.engine.accept.sample_target_tokens` checks them."""
    return runner.forward(make_tree_batch(store, slots, trees, root_positions), store, taps=taps, check_nan=False)
