"""SpecPV: verification on a partial cache, corrected by full passes (Tan et al. 2025, section 3).

A round verifies the trees in one of three modes:

* full: the text is not longer than a partial cache would be;
* refresh: on the whole cache. The waiting tokens stand before the tree as a chain, so that their KV becomes exact and
  is committed, and the partial cache is filled anew with the chunks that the tree's queries score highest;
* partial: on the partial cache. What is accepted waits in its buffer.

Tokens that partial verification accepts are emitted and never looked at again: the output is approximate.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.attention.transfer import to_device
from longdraft.engine.accept import AcceptedPath
from longdraft.engine.method import Method, register
from longdraft.engine.round_result import RoundMode, RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.engine.verifier import Verifier, VerifyOutput, verify_trees
from longdraft.errors import UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from longdraft.options import Options, option, parse, takes
from longdraft.trees.tree import TokenTree
from longdraft.views.scorers import REDUCTIONS, SCORERS
from longdraft.views.sparse_kv_cache import SparseKVCache
from longdraft.views.view import DTYPES, View, check_multiples, parse_dtype


@dataclass(frozen=True)
class SpecPVOptions(Options):
    """The partial KV that SpecPV verifies on (section 3.2).

    Drafters take their options from the same words as the schedule: names differ where values may (``block``,
    ``selector``), and are shared where one value suits both (``sink``, ``recent``).
    """

    budget: int = option(1024, min=1, help="KV rows that are chosen from the text")
    selector: str = option("minmax", choices=tuple(SCORERS), help="how blocks are ranked")
    reduction: str = option("mean", choices=REDUCTIONS, help="how scores of several queries become one")
    margin: int = option(20, min=1, help="rows beyond a tree that a partial round leaves free before a full pass")
    sink: int = option(32, min=0, help="first rows, always seen")
    recent: int = option(128, min=1, help="last rows, always seen")
    block: int = option(16, min=1, help="rows that are chosen together")
    view_dtype: str | None = option(
        choices=tuple(DTYPES), help="what the partial KV is rounded to", usual="not rounded"
    )

    def view(self) -> View:
        """The view that partial verification attends to: sink | chosen chunks | window | buffer.

        Each layer and KV head has its own chunks: those that the queries of the last full pass score highest. What the
        paper calls SpecPV-4K has a budget of 4,096; all sizes are multiples of a block.

        Raises:
            ValueError: for sizes that make no view.
        """
        check_multiples("block", self.block, budget=self.budget, sink=self.sink, window=self.recent)
        chooses = SCORERS[self.selector] is not None
        if chooses and self.budget < self.sink + self.recent:
            raise ValueError(
                f"budget must be at least sink + window ({self.sink + self.recent} tokens), got {self.budget}; "
                "selector 'streaming' retrieves nothing."
            )
        chosen = self.budget if chooses else 0
        return View(self.selector, chosen, self.sink, self.recent, self.block, self.margin, self.reduction)


class SpecPV(Verifier):
    """Partial verification as published: what it accepts is emitted.

    Args:
        view: of :meth:`SpecPVOptions.view`; its room is the margin.
        dtype: what the partial cache's keys and values are rounded to; None: they are kept as they are.
        start: rows of text from which on a part of them is verified; None: those that the view's chunks hold.
    """

    exact = False

    def __init__(self, view: View, dtype: torch.dtype | None = None, min_context: int | None = None) -> None:
        self.view, self._dtype = view, dtype
        self._start = view.size if min_context is None else min_context
        self.views = (view,)

    def num_extra_entries(self, max_nodes: int) -> int:
        # A refresh appends the waiting tokens too; the shorter of a batch are padded to the longest.
        return self.view.max_new + max_nodes + 1

    def bind(self, runner: TargetRunner, store: KVStore, max_nodes: int, query_layers: tuple[int, ...] = ()) -> None:
        super().bind(runner, store, max_nodes, query_layers)
        if runner.has_recurrent_layers:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} has recurrent layers, which SpecPV cannot verify in part: a state has "
                "no rows to correct afterwards. Use its drafter's own name (longspec, eagle3, small-lm, "
                "prompt-lookup), or self, which drafts on a part of the KV."
            )
        if not store.shape.layers:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} has windows in every layer, so SpecPV has nothing to verify in part. "
                "Use its drafter's own name (longspec, eagle3, small-lm, prompt-lookup)."
            )

        def new_store(slots: int, capacity: int) -> KVStore:
            return runner.new_store(
                slots, capacity, store.feature_layers, resident=True, dtype=self._dtype, with_states=False
            )

        # Behind the margin, there is room for the tokens that go over it and for the next tree.
        self.partial_cache = SparseKVCache(store, new_store, self.view, 2 * (max_nodes + 1))
        self._all_queries = Taps(queries=tuple(range(store.shape.layers)))
        # Slot -> layer -> (Hq, rows, d): the queries of all rows of the full pass that is being committed.
        self._queries: dict[int, dict[int, torch.Tensor]] = {}

    def select_mode(self, sequence: Sequence) -> RoundMode:
        """Returns how to verify a sequence next (the paper's SelectMode)."""
        slot = sequence.slot
        if not self.partial_cache.in_use(slot):
            return "refresh" if self.store.lengths[slot] > self._start else "full"
        return "partial" if self.partial_cache.num_buffered(slot) <= self.view.max_new else "refresh"

    def kv_len(self, sequence: Sequence) -> int:
        """Rows of the partial cache once there is one: refreshes come at a rate that drafting does not change."""
        slot = sequence.slot
        return self.partial_cache.store.lengths[slot] if self.partial_cache.in_use(slot) else super().kv_len(sequence)

    # --- verification ---

    def verify(self, sequences: list[Sequence], trees: list[TokenTree]) -> list[VerifyOutput]:
        modes = [self.select_mode(s) for s in sequences]
        verified: dict[int, VerifyOutput] = {}
        for part, verify in ((False, self._verify_full), (True, self._verify_partial)):
            chosen = [i for i, mode in enumerate(modes) if (mode == "partial") == part]
            if chosen:
                found = verify([sequences[i] for i in chosen], [trees[i] for i in chosen], [modes[i] for i in chosen])
                verified |= zip(chosen, found, strict=True)
        return [verified[i] for i in range(len(sequences))]

    def _verify_full(
        self, sequences: list[Sequence], trees: list[TokenTree], modes: list[RoundMode]
    ) -> list[VerifyOutput]:
        taps = self._all_queries if "refresh" in modes else Taps(queries=self.query_layers)
        # Tokens before the root whose KV the full store lacks.
        waiting = [s.tokens[self.store.lengths[s.slot] : -1] for s in sequences]
        longer = [tree.with_prefix(tokens) for tree, tokens in zip(trees, waiting, strict=True)]
        # Waiting tokens are final: nobody reads their logits.
        size = max(tree.size for tree in longer)
        out = self.forward(longer, sequences, taps, size - min(map(len, waiting)))
        verified = self.split_output(sequences, trees, out)
        for b, (v, tokens, mode) in enumerate(zip(verified, waiting, modes, strict=True)):
            if mode == "refresh":
                self._queries[v.sequence.slot] = {n: q[b, :, : longer[b].size] for n, q in out.queries.items()}
            v.mode, v.logits = mode, v.logits[len(tokens) + len(v.logits) - size :]
            v.queries = {layer: q[:, len(tokens) :] for layer, q in v.queries.items()}
        return verified

    def _verify_partial(
        self, sequences: list[Sequence], trees: list[TokenTree], modes: list[RoundMode]
    ) -> list[VerifyOutput]:
        slots = [s.slot for s in sequences]
        bases = [self.store.lengths[slot] + self.partial_cache.num_buffered(slot) for slot in slots]
        out = verify_trees(self.runner, self.partial_cache.store, slots, trees, bases, Taps(queries=self.query_layers))
        return self.split_output(sequences, trees, out, "partial")

    # --- what is kept ---

    def commit(self, output: VerifyOutput, accepted: AcceptedPath) -> RoundResult:
        slot = output.sequence.slot
        if output.mode == "partial":
            self.partial_cache.buffer_path(slot, accepted.nodes)
            return output.round_result(accepted)
        start, waiting = self.store.lengths[slot], self.partial_cache.num_buffered(slot)
        path = [*range(waiting), *(waiting + node for node in accepted.nodes)]
        self.store.commit(slot, path)
        queries = self._queries.pop(slot, None)
        if queries is not None and self.store.lengths[slot] > self._start:
            self._choose(slot, queries, path, range(waiting, waiting + output.tree.size))
        return output.round_result(accepted, start if waiting else None)

    def _choose(self, slot: int, queries: dict[int, torch.Tensor], path: list[int], rows: SequenceOf[int]) -> None:
        """Fills the partial cache with the chunks that the queries of a full pass's ``rows`` score highest.

        Args:
            path: the accepted rows.
        """
        if self.view.reduction == "last":
            rows = path[-1:]  # the newest verified token
        index = to_device(list(rows), self.runner.device)
        if self.store.shape.padded:  # layers may have different heads
            self.partial_cache.reselect(
                slot, {layer: q.index_select(1, index.to(q.device)) for layer, q in queries.items()}
            )
            return
        of_layers = torch.stack([queries[layer] for layer in range(self.store.shape.layers)])
        self.partial_cache.reselect(slot, of_layers.index_select(2, index.to(of_layers.device)))

    def release(self, sequence: Sequence) -> None:
        self.partial_cache.invalidate(sequence.slot)
        self.store.num_unverified[sequence.slot] = 0


@takes(SpecPVOptions)
def _schedule(**options: Any) -> SpecPV:
    (o,) = parse("SpecPV", options, SpecPVOptions)
    return SpecPV(o.view(), parse_dtype(o.view_dtype))


register(
    Method(
        "specpv",
        None,
        "verifies on the part of a long context that matters, and on all of it every few rounds; any drafter",
        "Tan et al. 2025, SpecPV, arXiv:2512.02337",
        verifier=_schedule,
    )
)
