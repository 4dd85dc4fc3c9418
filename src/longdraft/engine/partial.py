"""SpecPV: verification on a partial cache, put right by full passes (Tan et al. 2025, section 3), and its exact tier.

A round verifies the trees in one of three modes:

* full: the text is not longer than a partial cache would be, or a :class:`~longdraft.engine.trial.Trial` says that
  partial verification does not pay here;
* refresh: on the whole cache. The tokens in waiting stand before the tree as a chain, so their KV becomes exact and is
  committed, and the partial cache is filled anew with the blocks that the tree's queries want;
* partial: on the partial cache. What is accepted waits in its buffer.

Which tokens are final differs. As published (`specpv`), those that partial verification accepts are, and nobody looks
at them again: approximate. In the exact tier (`specpv-exact`) they are guesses. The next full pass finds them in its
tree, as a chain before what was drafted since, and the walk down that tree samples from the target's distribution as
anywhere else: every emitted token is such a sample, so the output is the target's for any partial cache. Guesses are
sampled with the random numbers that the true samples will use (Sampler.rehearsal), so most of them turn out right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial

import torch

from longdraft.attention.transfer import on_device
from longdraft.engine.accept import Accepted
from longdraft.engine.event import Event, Mode
from longdraft.engine.schedule import Schedule, Verified, verify_trees
from longdraft.engine.sequence import Sequence
from longdraft.engine.trial import Trial
from longdraft.memory.store import KVStore
from longdraft.model.runner import Taps, TargetRunner
from longdraft.trees.tree import TokenTree
from longdraft.views.cache import TrueCache
from longdraft.views.scorers import SCORERS
from longdraft.views.view import View, check_multiples, check_name, check_sizes


def partial_view(
    budget: int = 1024,
    sink: int = 32,
    window: int = 128,
    block: int = 16,
    margin: int = 20,
    selector: str = "minmax",
    reduction: str = "mean",
) -> View:
    """What partial verification attends to (section 3.2): sink | retrieved blocks | window | buffer.

    Each layer and KV head has its own blocks, those that the last full pass's queries want most.

    Args:
        budget: retrieved tokens; what the paper calls SpecPV-4K has 4,096.
        sink, window: the first and the last tokens, always there.
        block: tokens that are selected together; all sizes are multiples of it.
        margin: tokens that may wait for a full pass.
        selector: one of ``SCORERS``; "streaming" retrieves nothing.
        reduction: one of ``REDUCTIONS``, over the queries.

    Raises:
        ValueError: for sizes that make no view, or names that are not known.
    """
    check_sizes(0, budget=budget, sink=sink)
    check_sizes(1, window=window, block=block, margin=margin)
    check_multiples("block", block, budget=budget, sink=sink, window=window)
    check_name("selector", selector, tuple(SCORERS))
    retrieves = SCORERS[selector] is not None
    if retrieves and budget < sink + window:
        raise ValueError(
            f"budget must be at least sink + window ({sink + window} tokens), got {budget}; selector 'streaming' "
            "retrieves nothing."
        )
    return View(selector, budget if retrieves else 0, sink, window, block, margin, reduction)


class SpecPV(Schedule):
    """Partial verification as published: what it accepts is emitted.

    Args:
        view: of :func:`partial_view`; its room is the margin.
        dtype: what the partial cache's keys and values are rounded to; None: they are kept as they are.
    """

    exact = False

    def __init__(self, view: View, dtype: torch.dtype | None = None) -> None:
        self.view, self._dtype = view, dtype
        self.views = (view,)
        self._trial: Trial | None = None  # where rounds are planned

    def extra_rows(self, max_nodes: int) -> int:
        # A refresh appends the tokens in waiting too; the shorter of a batch are padded to the longest.
        return self.view.room + max_nodes + 1

    def open(
        self,
        runner: TargetRunner,
        store: KVStore,
        max_nodes: int,
        query_layers: tuple[int, ...] = (),
    ) -> None:
        super().open(runner, store, max_nodes, query_layers)

        def new_store(slots: int, capacity: int) -> KVStore:
            return runner.new_store(slots, capacity, store.feature_layers, resident=True, dtype=self._dtype)

        # Behind the margin, the tokens that go over it and the next tree.
        self.partial = TrueCache(store, new_store, self.view, 2 * (max_nodes + 1))
        self._taps = Taps(queries=tuple(range(store.shape.layers)))
        # The queries of the last full pass, of a slot's whole block: layer -> (Hq, rows, d).
        self._queries: dict[int, dict[int, torch.Tensor]] = {}

    def mode(self, sequence: Sequence) -> Mode:
        """How a sequence is verified next (the paper's SelectMode)."""
        slot = sequence.slot
        if not self.partial.in_use(slot):
            return "refresh" if self._pays and self.store.lengths[slot] > self.view.budget else "full"
        return "partial" if self.partial.waiting(slot) <= self._margin(sequence) else "refresh"

    @property
    def _pays(self) -> bool:
        return self._trial is None or self._trial.on

    def use_planner(self) -> None:
        # What is confirmed later brings less than it seems to: that it pays has to be seen first.
        self._trial = Trial(on=not self.exact)

    def observe_round(self, events: SequenceOf[Event], seconds: float, plain: float) -> None:
        assert self._trial is not None
        modes = {event.mode for event in events}
        # Its first refresh has nothing to put right: the cycle begins there.
        ended = modes == {"full"} or any(event.replaced is not None for event in events)
        if modes != {"full"} or not self._trial.on:  # a text that a partial cache would hold says nothing
            tokens = sum(len(event.emitted) for event in events)
            self._trial.saw(tokens, seconds, ended, len(events) / max(plain, 1e-9))
        if ended and not self._trial.on:
            for event in events:
                self.partial.forget(event.sequence.slot)

    def _margin(self, sequence: Sequence) -> int:
        """Tokens that may wait while partial verification goes on."""
        return self.view.room

    def length(self, sequence: Sequence) -> int:
        """Those of the partial cache, once there is one. A refresh comes every so many tokens, whatever is drafted."""
        slot = sequence.slot
        return self.partial.store.lengths[slot] if self.partial.in_use(slot) else super().length(sequence)

    def verify(self, sequences: list[Sequence], trees: list[TokenTree]) -> list[Verified]:
        modes = [self.mode(s) for s in sequences]
        # What waits is put right together: one forward of the batch, not one a sequence.
        if "refresh" in modes:
            modes = ["refresh" if mode == "partial" else mode for mode in modes]
        found: dict[int, Verified] = {}
        for full in (True, False):
            group = [i for i, mode in enumerate(modes) if (mode != "partial") == full]
            if group:
                own = [modes[i] for i in group]
                taps = self._taps if "refresh" in own else Taps(queries=self.query_layers)
                one = partial(self._full, taps=taps) if full else self._partial
                part = one([sequences[i] for i in group], [trees[i] for i in group])
                for i, verified in zip(group, part, strict=True):
                    verified.mode = modes[i]
                    found[i] = verified
        return [found[i] for i in range(len(sequences))]

    def _full(self, sequences: list[Sequence], trees: list[TokenTree], taps: Taps) -> list[Verified]:
        waiting = [self.waiting(s) for s in sequences]
        longer = [tree.prepended(tokens) for tree, tokens in zip(trees, waiting, strict=True)]
        out = self.forward(longer, sequences, taps)
        assert out.logits is not None
        found = []
        for b, (s, tree) in enumerate(zip(sequences, trees, strict=True)):
            if taps is self._taps:
                self._queries[s.slot] = {layer: q[b, :, : longer[b].size] for layer, q in out.queries.items()}
            verified = self._walk(s, tree, longer[b], out.logits[b])
            verified.queries = self.queries(out, b, longer[b].size - verified.tree.size)
            found.append(verified)
        return found

    def _partial(self, sequences: list[Sequence], trees: list[TokenTree]) -> list[Verified]:
        slots = [s.slot for s in sequences]
        bases = [self.store.lengths[slot] + self.partial.waiting(slot) for slot in slots]
        out = verify_trees(self.runner, self.partial.store, slots, trees, bases, Taps(queries=self.query_layers))
        assert out.logits is not None
        return [
            Verified(s, tree, tree, self._guessing(s), out.logits[b], queries=self.queries(out, b))
            for b, (s, tree) in enumerate(zip(sequences, trees, strict=True))
        ]

    def waiting(self, sequence: Sequence) -> list[int]:
        """Tokens before the root whose KV the full store lacks."""
        return self.drafter_sequence(sequence).tokens[self.store.lengths[sequence.slot] : -1]

    def _walk(self, sequence: Sequence, tree: TokenTree, longer: TokenTree, logits: torch.Tensor) -> Verified:
        """What is walked after a full pass: the drafted tree; the tokens before it are final already."""
        return Verified(sequence, tree, tree, sequence, logits[longer.size - tree.size :])

    def _guessing(self, sequence: Sequence) -> Sequence:
        """What walks down a tree with partial logits: the sequence itself, since its tokens are final."""
        return sequence

    def commit(self, verified: Verified, accepted: Accepted) -> Event:
        slot, event = verified.sequence.slot, verified.event(accepted)
        if verified.mode == "partial":
            self.partial.keep(slot, accepted.path)
            return replace(event, unconfirmed=len(accepted.tokens))
        start, waiting = self.store.lengths[slot], self.partial.waiting(slot)
        path = [*range(waiting), *(waiting + node for node in accepted.path)]
        self._refresh(verified.sequence, path, range(waiting, waiting + verified.drafted.size))
        return replace(event, replaced=start if waiting else None)

    def _refresh(self, sequence: Sequence, path: list[int], rows: SequenceOf[int]) -> None:
        """Commits a full pass's rows; fills the partial cache, if the pass brought queries and the text is long enough.

        Args:
            path: the accepted rows. rows: those whose queries say which blocks are wanted.
        """
        slot = sequence.slot
        self.store.commit(slot, path)
        queries = self._queries.pop(slot, None)
        if queries is None or self.store.lengths[slot] <= self.view.budget:
            return
        if self.view.reduction == "last":
            rows = path[-1:]  # the newest verified token
        wanted = on_device(list(rows), self.runner.device)
        self.partial.choose(slot, {layer: q.index_select(1, wanted.to(q.device)) for layer, q in queries.items()})

    def close(self, sequence: Sequence) -> None:
        self.partial.forget(sequence.slot)
        self.store.unverified[sequence.slot] = 0


class ExactSpecPV(SpecPV):
    """Partial verification only guesses; a full pass confirms before anything is emitted: exact.

    A wrong guess makes all behind it worthless, so how many may wait follows the last ones: twice as many, up to the
    view's margin, when all were right; as many as were right when not.
    """

    exact = True

    def open(
        self,
        runner: TargetRunner,
        store: KVStore,
        max_nodes: int,
        query_layers: tuple[int, ...] = (),
    ) -> None:
        super().open(runner, store, max_nodes, query_layers)
        # The sequences with what was guessed behind what is certain; those whose samplers rehearse already.
        self._guesses: dict[int, Sequence] = {}
        self._rehearsing: set[int] = set()
        self._margins: defaultdict[int, int] = defaultdict(lambda: (self.view.room + 1) // 2)

    def drafter_sequence(self, sequence: Sequence) -> Sequence:
        if sequence.index not in self._guesses:
            self._guesses[sequence.index] = sequence.fork()
        return self._guesses[sequence.index]

    def _margin(self, sequence: Sequence) -> int:
        over = self.drafter_sequence(sequence).finish_reason is not None
        return -1 if over else self._margins[sequence.index]

    def _guessing(self, sequence: Sequence) -> Sequence:
        guess = self.drafter_sequence(sequence)
        if sequence.index not in self._rehearsing:
            self._rehearsing.add(sequence.index)
            guess.sampler = sequence.sampler.rehearsal()
        return guess

    def _walk(self, sequence: Sequence, tree: TokenTree, longer: TokenTree, logits: torch.Tensor) -> Verified:
        """What is walked after a full pass: the guesses, then the drafted tree behind them."""
        return Verified(sequence, tree, longer, sequence, logits)

    def commit(self, verified: Verified, accepted: Accepted) -> Event:
        sequence, event = verified.sequence, verified.event(accepted)
        if verified.mode == "partial":
            self.partial.keep(sequence.slot, accepted.path)
            return replace(event, emitted=(), from_draft=0, unconfirmed=len(accepted.tokens))
        start, waiting = self.store.lengths[sequence.slot], self.partial.waiting(sequence.slot)
        # With nothing waiting, the root is the last certain token. With w rows waiting, they are that token and the
        # guesses but the last, which is the drafted tree's root: w guesses.
        right = min(accepted.from_draft, waiting)
        confirmed = right == waiting
        # Nodes under a wrong guess ask for what nobody will need.
        rows = range(waiting, verified.tree.size) if confirmed else accepted.path
        self._refresh(sequence, list(accepted.path), rows)
        if waiting:
            margin = 2 * self._margins[sequence.index] if confirmed else right
            self._margins[sequence.index] = min(max(margin, 2), self.view.room)
        guess = self.drafter_sequence(sequence)
        self._rehearsing.discard(sequence.index)
        guess.sampler = sequence.sampler
        guess.follow(sequence)
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
