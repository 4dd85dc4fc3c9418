"""SpecPV: verification on a partial cache, corrected by full passes (Tan et al. 2025, section 3), and its exact tier.

A round verifies the trees in one of three modes:

* full: the text is not longer than a partial cache would be, or a :class:`~longdraft.engine.trial.Trial` found that
  partial verification does not pay here;
* refresh: on the whole cache. The waiting tokens stand before the tree as a chain, so that their KV becomes exact and
  is committed, and the partial cache is filled anew with the chunks that the tree's queries score highest;
* partial: on the partial cache. What is accepted waits in its buffer.

The two schedules differ in which tokens are final. As published (`specpv`), those that partial verification accepts
are, and they are never looked at again: approximate. In the exact tier (`specpv-exact`) they are guesses. The next full
pass has them in its tree, as a chain before what was drafted since, and the walk down that tree samples from the
target's distribution as anywhere else. Every emitted token is such a sample, so the output is the target's for any
partial cache. Guesses are sampled with the random numbers that the true samples will use (Sampler.rehearsal), so most
of them turn out right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch

from longdraft.attention.transfer import on_device
from longdraft.engine.accept import Accepted
from longdraft.engine.event import Event, Mode
from longdraft.engine.schedule import Schedule, Verified, verify_trees
from longdraft.engine.sequence import Sequence
from longdraft.engine.trial import Trial
from longdraft.errors import UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import TokenTree
from longdraft.views.cache import TrueCache
from longdraft.views.scorers import SCORERS
from longdraft.views.view import View, check_multiples, check_name, check_sizes


def partial_view(
    budget: int = 1024,
    sink: int = 32,
    window: int = 128,
    chunk: int = 16,
    margin: int = 20,
    scorer: str = "minmax",
    reduction: str = "mean",
) -> View:
    """Returns what partial verification attends to (section 3.2): sink | chosen chunks | window | buffer.

    Each layer and KV head has its own chunks: those that the queries of the last full pass score highest.

    Args:
        budget: tokens of the chosen chunks; what the paper calls SpecPV-4K has 4,096.
        sink, window: the first and the last tokens, always there.
        chunk: tokens that are chosen together (the paper's block); all sizes are multiples of it.
        margin: tokens that may wait for a full pass.
        scorer: one of ``SCORERS``; "streaming" chooses nothing.
        reduction: one of ``REDUCTIONS``, over the queries.

    Raises:
        ValueError: for sizes that make no view, or unknown names.
    """
    check_sizes(0, budget=budget, sink=sink)
    check_sizes(1, window=window, block=chunk, margin=margin)
    check_multiples("block", chunk, budget=budget, sink=sink, window=window)
    check_name("selector", scorer, tuple(SCORERS))
    chooses = SCORERS[scorer] is not None
    if chooses and budget < sink + window:
        raise ValueError(
            f"budget must be at least sink + window ({sink + window} tokens), got {budget}; selector 'streaming' "
            "retrieves nothing."
        )
    return View(scorer, budget if chooses else 0, sink, window, chunk, margin, reduction)


class SpecPV(Schedule):
    """Partial verification as published: what it accepts is emitted.

    Args:
        view: of :func:`partial_view`; its room is the margin.
        dtype: what the partial cache's keys and values are rounded to; None: they are kept as they are.
        start: rows of text from which on a part of them is verified; None: those that the view's chunks hold.
    """

    exact = False
    rereads = False

    def __init__(self, view: View, dtype: torch.dtype | None = None, start: int | None = None) -> None:
        self.view, self._dtype = view, dtype
        self._start = view.budget if start is None else start
        self.views = (view,)
        self._trial: Trial | None = None  # with a planner
        self._refreshes = 0  # of any sequence, since the trial's last cycle ended

    def extra_rows(self, max_nodes: int) -> int:
        # A refresh appends the waiting tokens too; the shorter of a batch are padded to the longest.
        return self.view.room + max_nodes + 1

    def open(self, runner: TargetRunner, store: KVStore, max_nodes: int, query_layers: tuple[int, ...] = ()) -> None:
        super().open(runner, store, max_nodes, query_layers)
        if runner.recurrent:
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
                slots, capacity, store.feature_layers, resident=True, dtype=self._dtype, states=False
            )

        # Behind the margin, there is room for the tokens that go over it and for the next tree.
        self.partial = TrueCache(store, new_store, self.view, 2 * (max_nodes + 1))
        self._all_queries = Taps(queries=tuple(range(store.shape.layers)))
        # Slot -> layer -> (Hq, rows, d): the queries of all rows of the full pass that is being committed.
        self._queries: dict[int, dict[int, torch.Tensor]] = {}

    # --- which mode ---

    def mode(self, sequence: Sequence) -> Mode:
        """Returns how to verify a sequence next (the paper's SelectMode)."""
        slot = sequence.slot
        pays = self._trial is None or self._trial.on
        if not self.partial.in_use(slot):
            return "refresh" if pays and self.store.lengths[slot] > self._start else "full"
        return "partial" if pays and self.partial.waiting(slot) <= self._margin(sequence) else "refresh"

    def _margin(self, sequence: Sequence) -> int:
        """Tokens that may wait while partial verification goes on."""
        return self.view.room

    def use_planner(self) -> None:
        # The exact tier's guesses bring less than they seem to: it starts off, and has to prove that it pays.
        self._trial = Trial(on=not self.exact)

    def observe_round(self, events: SequenceOf[Event], seconds: float, plain: float) -> None:
        assert self._trial is not None
        modes = {event.mode for event in events}
        # A cycle has a refresh of each sequence. The first one replaces no rows: a cycle begins there.
        self._refreshes += sum(event.replaced is not None for event in events)
        cycle_ended = modes == {"full"} or self._refreshes >= len(events)
        self._refreshes = 0 if cycle_ended else self._refreshes
        if modes != {"full"} or not self._trial.on:  # a text that a partial cache would hold says nothing
            tokens = sum(len(event.emitted) for event in events)
            self._trial.observe(tokens, seconds, cycle_ended, len(events) / max(plain, 1e-9))
        if not self._trial.on:
            for event in events:
                if event.mode != "partial":  # nothing waits
                    self.partial.forget(event.sequence.slot)

    def length(self, sequence: Sequence) -> int:
        """Rows of the partial cache once there is one: refreshes come at a rate that drafting does not change."""
        slot = sequence.slot
        return self.partial.store.lengths[slot] if self.partial.in_use(slot) else super().length(sequence)

    # --- verification ---

    def verify(self, sequences: list[Sequence], trees: list[TokenTree]) -> list[Verified]:
        modes = [self.mode(s) for s in sequences]
        in_full = [i for i, mode in enumerate(modes) if mode != "partial"]
        in_part = [i for i, mode in enumerate(modes) if mode == "partial"]
        verified: dict[int, Verified] = {}
        if in_full:
            chosen = [sequences[i] for i in in_full], [trees[i] for i in in_full], [modes[i] for i in in_full]
            verified |= zip(in_full, self._verify_full(*chosen), strict=True)
        if in_part:
            part = self._verify_partial([sequences[i] for i in in_part], [trees[i] for i in in_part])
            verified |= zip(in_part, part, strict=True)
        for i, mode in enumerate(modes):
            verified[i].mode = mode
        return [verified[i] for i in range(len(sequences))]

    def _verify_full(self, sequences: list[Sequence], trees: list[TokenTree], modes: list[Mode]) -> list[Verified]:
        taps = self._all_queries if "refresh" in modes else Taps(queries=self.query_layers)
        longer = [tree.prepended(self.waiting(s)) for s, tree in zip(sequences, trees, strict=True)]
        out = self.forward(longer, sequences, taps)
        assert out.logits is not None
        verified = []
        for b, (s, tree) in enumerate(zip(sequences, trees, strict=True)):
            if modes[b] == "refresh":
                self._queries[s.slot] = {layer: q[b, :, : longer[b].size] for layer, q in out.queries.items()}
            walked = self._walked(tree, longer[b])
            start = longer[b].size - walked.size
            queries = self.queries(out, b, start)
            verified.append(Verified(s, tree, walked, s, out.logits[b][start:], queries=queries))
        return verified

    def _verify_partial(self, sequences: list[Sequence], trees: list[TokenTree]) -> list[Verified]:
        slots = [s.slot for s in sequences]
        bases = [self.store.lengths[slot] + self.partial.waiting(slot) for slot in slots]
        out = verify_trees(self.runner, self.partial.store, slots, trees, bases, Taps(queries=self.query_layers))
        assert out.logits is not None
        return [
            Verified(s, tree, tree, self._guesser(s), out.logits[b], queries=self.queries(out, b))
            for b, (s, tree) in enumerate(zip(sequences, trees, strict=True))
        ]

    def waiting(self, sequence: Sequence) -> list[int]:
        """Tokens before the root whose KV the full store lacks."""
        return self.drafter_sequence(sequence).tokens[self.store.lengths[sequence.slot] : -1]

    def _walked(self, drafted: TokenTree, longer: TokenTree) -> TokenTree:
        """The tree to walk after a full pass over the longer one: the tokens before the drafted tree are final."""
        return drafted

    def _guesser(self, sequence: Sequence) -> Sequence:
        """The sequence that receives a partial verification's tokens: the true one, since they are final."""
        return sequence

    # --- what is kept ---

    def commit(self, verified: Verified, accepted: Accepted) -> Event:
        slot, event = verified.sequence.slot, verified.event(accepted)
        if verified.mode == "partial":
            self.partial.keep(slot, accepted.path)
            return replace(event, unconfirmed=len(accepted.tokens))
        start, waiting = self.store.lengths[slot], self.partial.waiting(slot)
        path = [*range(waiting), *(waiting + node for node in accepted.path)]
        self._commit_full(verified.sequence, path, range(waiting, waiting + verified.drafted.size))
        return replace(event, replaced=start if waiting else None)

    def _commit_full(self, sequence: Sequence, path: list[int], rows: SequenceOf[int]) -> None:
        """Commits a full pass's rows; fills the partial cache if the pass brought queries and the text is long enough.

        Args:
            path: the accepted rows.
            rows: those whose queries choose the chunks.
        """
        slot = sequence.slot
        self.store.commit(slot, path)
        queries = self._queries.pop(slot, None)
        if queries is None or self.store.lengths[slot] <= self._start:
            return
        if self.view.reduction == "last":
            rows = path[-1:]  # the newest verified token
        index = on_device(list(rows), self.runner.device)
        if self.store.shape.padded:  # layers may have different heads
            self.partial.choose(slot, {layer: q.index_select(1, index.to(q.device)) for layer, q in queries.items()})
            return
        of_layers = torch.stack([queries[layer] for layer in range(self.store.shape.layers)])
        self.partial.choose(slot, of_layers.index_select(2, index.to(of_layers.device)))

    def close(self, sequence: Sequence) -> None:
        self.partial.forget(sequence.slot)
        self.store.unverified[sequence.slot] = 0


class ExactSpecPV(SpecPV):
    """Partial verification only guesses; a full pass confirms before anything is emitted: exact.

    A wrong guess makes all behind it worthless, so the number that may wait follows the last ones: twice as many, up to
    the view's margin, when all were right; as many as were right when not.
    """

    exact = True

    def open(self, runner: TargetRunner, store: KVStore, max_nodes: int, query_layers: tuple[int, ...] = ()) -> None:
        super().open(runner, store, max_nodes, query_layers)
        # By index: sequences with their guesses appended, those of them whose samplers rehearse already, and margins.
        self._guesses: dict[int, Sequence] = {}
        self._rehearsing: set[int] = set()
        self._margins: defaultdict[int, int] = defaultdict(lambda: (self.view.room + 1) // 2)

    def drafter_sequence(self, sequence: Sequence) -> Sequence:
        if sequence.index not in self._guesses:
            self._guesses[sequence.index] = sequence.fork()
        return self._guesses[sequence.index]

    def _margin(self, sequence: Sequence) -> int:
        ended = self.drafter_sequence(sequence).finish_reason is not None
        return -1 if ended else self._margins[sequence.index]

    def _guesser(self, sequence: Sequence) -> Sequence:
        guess = self.drafter_sequence(sequence)
        if sequence.index not in self._rehearsing:
            self._rehearsing.add(sequence.index)
            guess.sampler = sequence.sampler.rehearsal()
        return guess

    def _walked(self, drafted: TokenTree, longer: TokenTree) -> TokenTree:
        """All of it: the guesses, then the drafted tree behind them."""
        return longer

    def commit(self, verified: Verified, accepted: Accepted) -> Event:
        sequence, event = verified.sequence, verified.event(accepted)
        if verified.mode == "partial":
            self.partial.keep(sequence.slot, accepted.path)
            return replace(event, emitted=(), from_draft=0, unconfirmed=len(accepted.tokens))
        start, waiting = self.store.lengths[sequence.slot], self.partial.waiting(sequence.slot)
        # If nothing waits, the root is the last certain token. If w rows wait, they are that token and the guesses but
        # the last, which is the drafted tree's root: w guesses.
        right = min(accepted.from_draft, waiting)
        confirmed = right == waiting
        # The queries of nodes under a wrong guess are of no use.
        rows = range(waiting, verified.tree.size) if confirmed else accepted.path
        self._commit_full(sequence, list(accepted.path), rows)
        if waiting:
            margin = 2 * self._margins[sequence.index] if confirmed else right
            self._margins[sequence.index] = min(max(margin, 2), self.view.room)
        guess = self.drafter_sequence(sequence)
        self._rehearsing.discard(sequence.index)
        guess.sampler = sequence.sampler
        guess.copy_output(sequence)
        return replace(
            event,
            sequence=guess,
            # What was drafted behind a wrong guess is neither right nor wrong.
            tree=event.tree if confirmed else event.tree.best(0),
            path=tuple(node - waiting for node in accepted.path[waiting:]) if confirmed else (0,),
            target_tokens=accepted.tokens[right:] if confirmed else (),
            accepted=accepted.from_draft - right,
            # A walk that ended with the text refuted nothing.
            taken_back=0 if sequence.finish_reason else waiting - right,
            replaced=start if waiting else None,
        )

    def close(self, sequence: Sequence) -> None:
        super().close(sequence)
        self._guesses.pop(sequence.index, None)
        self._margins.pop(sequence.index, None)
        self._rehearsing.discard(sequence.index)
