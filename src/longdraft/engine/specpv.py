"""SpecPV: verification on a partial KV cache, corrected by full passes (Tan et al. 2025, section 3).

A round verifies the trees in one of three modes:

* full: on the full KV cache, until the context is longer than a partial cache.
* partial: on the partial KV cache. The KV of accepted tokens is buffered there.
* refresh: the paper's full pass, on the full KV cache. The buffered tokens precede the tree as a chain, so their exact
  KV is computed and committed. Then the partial cache is filled with the chunks that the tree's queries score highest.

Tokens that a partial verification accepts are emitted without a second check, so the output is approximate.
Shapes: Hq query heads, head size d.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from longdraft.attention.transfer import to_device
from longdraft.engine.accept import AcceptedPath
from longdraft.engine.round_result import RoundMode, RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.engine.verifier import Verifier, VerifyOutput, split_output, verify_trees
from longdraft.errors import UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from longdraft.options import Options, option, parse, takes
from longdraft.trees.tree import TokenTree
from longdraft.views.scorers import REDUCTIONS, SCORERS
from longdraft.views.sparse_kv_cache import SparseKVCache
from longdraft.views.view import DTYPES, View, check_multiples, parse_dtype

# Fewest and most selected entries where the option budget is not set.
MIN_BUDGET, MAX_BUDGET = 1024, 4096


@dataclass(frozen=True)
class SpecPVOptions(Options):
    """Options of SpecPV's partial KV cache (section 3.2).

    Verifier and drafter share one set of options: ``sink`` and ``recent`` apply to both, ``block`` and ``selector`` to
    the verifier only. A :class:`View` has other names for three options: ``block`` is the chunk size, ``recent`` the
    window, and ``margin``, the size of the buffer, is ``max_new``.
    """

    budget: int | None = option(
        min=1,
        help="KV entries that are selected from the context",
        usual=f"an eighth of the context, {MIN_BUDGET:,} to {MAX_BUDGET:,}",
    )
    selector: str = option("minmax", choices=tuple(SCORERS), help="how blocks are scored")
    reduction: str = option("mean", choices=REDUCTIONS, help="how scores of several queries become one")
    margin: int = option(20, min=1, help="buffered tokens after which a full pass follows")
    sink: int = option(32, min=0, help="first KV entries, always seen")
    recent: int = option(128, min=1, help="last KV entries, always seen")
    block: int = option(16, min=1, help="KV entries that are selected together")
    view_dtype: str | None = option(
        choices=tuple(DTYPES), help="what the partial KV is rounded to", usual="not rounded"
    )
    reread: bool = option(
        True, help="the draft reads again what a full pass has corrected; the paper's keeps what partial passes gave"
    )

    def view(self) -> View:
        """Makes the view of partial verification: sink | selected chunks | window | buffer.

        Each KV head of each layer selects its own chunks. The paper's SpecPV-4K has a budget of 4,096. Without a
        budget the view grows with the context.

        Raises:
            ValueError: a size is out of range, or no multiple of ``block``.
        """
        check_multiples("block", self.block, budget=self.budget or 0, sink=self.sink, window=self.recent)
        sizes = (self.sink, self.recent, self.block, self.margin, self.reduction)
        if SCORERS[self.selector] is None:
            return View(self.selector, 0, *sizes)
        always_seen = self.sink + self.recent
        if self.budget is None:
            least, most = (max(always_seen, budget) for budget in (MIN_BUDGET, MAX_BUDGET))
            return View(self.selector, most, *sizes, min_selected=least)
        if self.budget < always_seen:
            raise ValueError(
                f"budget must be at least sink + window ({always_seen} tokens), got {self.budget}; "
                "selector 'streaming' retrieves nothing."
            )
        return View(self.selector, self.budget, *sizes)


class SpecPV(Verifier):
    """Verifies most rounds on a partial KV cache.

    Args:
        view: selects the entries of the partial cache; from :meth:`SpecPVOptions.view`.
        dtype: dtype of the partial cache's KV; None: the dtype of the full cache.
        min_context: verification is partial in contexts longer than this; None: longer than the view.
        reread: tell drafters which KV and states a refresh has replaced.
    """

    exact = False

    def __init__(
        self, view: View, dtype: torch.dtype | None = None, min_context: int | None = None, reread: bool = True
    ) -> None:
        self.view, self._dtype, self._rereads = view, dtype, reread
        self._min_context = view.size if min_context is None else min_context
        self.views = (view,)

    def num_extra_entries(self, max_nodes: int) -> int:
        # A refresh also appends the buffered tokens, and pads them to the longest sequence of the batch.
        return self.view.max_new + max_nodes + 1

    def bind(self, runner: TargetRunner, store: KVStore, max_nodes: int) -> None:
        super().bind(runner, store, max_nodes)
        if runner.has_recurrent_layers:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} has recurrent layers, which SpecPV cannot verify in part: a state has "
                "no KV entries to correct afterwards. Use the drafter as a method (longspec, eagle3, small-lm, "
                "prompt-lookup), or the method self, which drafts on a part of the KV."
            )
        if not store.shape.layers:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} has a sliding window in every layer, so SpecPV has no long KV to "
                "verify in part. Use the drafter as a method (longspec, eagle3, small-lm, prompt-lookup)."
            )

        new_store = partial(
            runner.new_store, feature_layers=store.feature_layers, resident=True, dtype=self._dtype, with_states=False
        )
        # Two trees of scratch entries: one for an accepted path that overfills the buffer, one for the next tree.
        self.partial_cache = SparseKVCache(store, new_store, self.view, 2 * (max_nodes + 1))
        # Slot -> layer -> (Hq, tokens, d): the queries of a refresh, between forward and commit.
        self._queries: dict[int, dict[int, torch.Tensor]] = {}

    def select_mode(self, sequence: Sequence) -> RoundMode:
        """Returns the mode of a sequence's next verification (the paper's SelectMode)."""
        slot = sequence.slot
        if not self.partial_cache.in_use(slot):
            return "refresh" if self.store.lengths[slot] > self._min_context else "full"
        return "partial" if self.partial_cache.num_buffered(slot) <= self.view.max_new else "refresh"

    def kv_len(self, sequence: Sequence) -> int:
        """Returns the length of the partial cache if it is in use, although a refresh reads the full cache."""
        slot = sequence.slot
        return self.partial_cache.store.lengths[slot] if self.partial_cache.in_use(slot) else super().kv_len(sequence)

    def verify(
        self, sequences: list[Sequence], trees: list[TokenTree], query_layers: tuple[int, ...] = ()
    ) -> list[VerifyOutput]:
        is_partial = [self.select_mode(s) == "partial" for s in sequences]
        outputs: dict[int, VerifyOutput] = {}
        for partial_group, verify in ((False, self._verify_full), (True, self._verify_partial)):
            group = [i for i in range(len(sequences)) if is_partial[i] == partial_group]
            if group:
                verified = verify([sequences[i] for i in group], [trees[i] for i in group], query_layers)
                outputs |= zip(group, verified, strict=True)
        return [outputs[i] for i in range(len(sequences))]

    def _verify_full(
        self, sequences: list[Sequence], trees: list[TokenTree], query_layers: tuple[int, ...]
    ) -> list[VerifyOutput]:
        modes = [self.select_mode(s) for s in sequences]
        taps = Taps(queries=tuple(range(self.store.shape.layers)) if "refresh" in modes else query_layers)
        # Tokens that partial rounds emitted before the root. The full store has no committed KV of these tokens yet.
        buffered_tokens = [s.tokens[self.store.lengths[s.slot] : -1] for s in sequences]
        prefixed_trees = [tree.with_prefix(tokens) for tree, tokens in zip(trees, buffered_tokens, strict=True)]
        # Buffered tokens are already emitted, so the forward computes no logits for the first num_skipped tokens.
        num_skipped, padded_size = min(map(len, buffered_tokens)), max(tree.size for tree in prefixed_trees)
        out = self.forward(prefixed_trees, sequences, taps, padded_size - num_skipped)
        outputs = split_output(sequences, trees, out, query_layers)
        for b, (output, tokens, mode) in enumerate(zip(outputs, buffered_tokens, modes, strict=True)):
            if mode == "refresh":
                num_tokens = prefixed_trees[b].size
                self._queries[output.sequence.slot] = {layer: q[b, :, :num_tokens] for layer, q in out.queries.items()}
            # Drop the buffered tokens, so that logits and queries begin at the root of the tree.
            root = len(tokens) + len(output.logits) - padded_size
            row_max, argmax = output.maxima
            output.mode, output.logits, output.maxima = mode, output.logits[root:], (row_max[root:], argmax[root:])
            output.queries = {layer: q[:, len(tokens) :] for layer, q in output.queries.items()}
        return outputs

    def _verify_partial(
        self, sequences: list[Sequence], trees: list[TokenTree], query_layers: tuple[int, ...]
    ) -> list[VerifyOutput]:
        slots = [s.slot for s in sequences]
        root_positions = [self.store.lengths[slot] + self.partial_cache.num_buffered(slot) for slot in slots]
        taps = Taps(queries=query_layers)
        out = verify_trees(self.runner, self.partial_cache.store, slots, trees, root_positions, taps)
        return split_output(sequences, trees, out, query_layers, "partial")

    def commit(self, output: VerifyOutput, accepted: AcceptedPath) -> RoundResult:
        slot = output.sequence.slot
        if output.mode == "partial":
            self.partial_cache.buffer_path(slot, accepted.nodes)
            return output.round_result(accepted)
        start, num_buffered = self.store.lengths[slot], self.partial_cache.num_buffered(slot)
        path = [*range(num_buffered), *(num_buffered + node for node in accepted.nodes)]
        self.store.commit(slot, path)
        queries = self._queries.pop(slot, None)
        if queries is not None and self.store.lengths[slot] > self._min_context:
            self._reselect(slot, queries, path, range(num_buffered, num_buffered + output.tree.size))
        return output.round_result(accepted, start if num_buffered and self._rereads else None)

    def _reselect(
        self, slot: int, queries: dict[int, torch.Tensor], path: list[int], query_indices: SequenceOf[int]
    ) -> None:
        """Fills the partial cache of a slot with the chunks that the queries of a refresh score highest.
        ``queries`` are those of all tokens of the forward. The tokens at ``query_indices`` score the chunks; with
        reduction "last" only the last token of ``path``, the indices of the accepted tokens."""
        if self.view.reduction == "last":
            query_indices = path[-1:]
        index = to_device(list(query_indices), self.runner.device)
        if self.store.shape.padded:  # layers have different head counts or sizes, so their queries cannot be stacked
            by_layer = {layer: q.index_select(1, index.to(q.device)) for layer, q in queries.items()}
            self.partial_cache.reselect(slot, by_layer)
            return
        stacked = torch.stack([queries[layer] for layer in range(self.store.shape.layers)])
        self.partial_cache.reselect(slot, stacked.index_select(2, index.to(stacked.device)))

    def release(self, sequence: Sequence) -> None:
        self.partial_cache.invalidate(sequence.slot)
        self.store.num_unverified[sequence.slot] = 0


@takes(SpecPVOptions)
def make_specpv(**options: Any) -> SpecPV:
    (values,) = parse("SpecPV", options, SpecPVOptions)
    return SpecPV(values.view(), parse_dtype(values.view_dtype), reread=values.reread)
