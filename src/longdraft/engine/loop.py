"""The decoding loop. Every method is this loop with other parts in it: see :meth:`Engine._round`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from longdraft.drafters.base import Drafter
from longdraft.engine.stats import Stats, Step, step_of
from longdraft.errors import CapabilityError, ContextError, PromptError
from longdraft.events import Event
from longdraft.host.lock import FairLock
from longdraft.host.runner import NO_TAPS, Taps, TargetRunner
from longdraft.kv.prompt_cache import PromptCache
from longdraft.kv.store import KVStore
from longdraft.planning.planner import Plan, Planner
from longdraft.sequence import Sequence, StopRule
from longdraft.trees.tree import TokenTree
from longdraft.verify.acceptance import accept
from longdraft.verify.schedule import Schedule

# Prompt tokens a prefill forward reads: long enough to keep the matrix units busy, short enough to bound memory.
PREFILL_CHUNK = 1024


@dataclass
class Engine:
    """Decodes a batch of sequences.

    Attributes:
        runner: the target.
        drafter: proposes trees.
        schedule: verifies them.
        sequences: the batch; sequence i uses slot i.
        rules: asked in order after each emitted token whether the sequence is finished.
        cache: where the KV lives, and what of it is already there.
        cancelled: asked between forwards; True ends all sequences with "cancelled".
        chunk: prompt tokens a prefill forward.
        planner: says how much to draft and to verify; None: the trees are the drafter's own.
        stats: what has been counted of each sequence so far.
    """

    runner: TargetRunner
    drafter: Drafter
    sequences: list[Sequence]
    rules: list[StopRule] = field(default_factory=list)
    cache: PromptCache = field(default_factory=PromptCache)
    schedule: Schedule = field(default_factory=Schedule)
    cancelled: Callable[[], bool] = lambda: False
    chunk: int = PREFILL_CHUNK
    planner: Planner | None = None

    def __post_init__(self) -> None:
        self._plan: Plan | None = None
        self._opened = 0
        self.stats = [Stats() for _ in self.sequences]
        if self.planner is not None:
            self.drafter.follow_budget()
            with self.runner.lock:  # runs on one target share what is known of it
                self._plan = self.planner.start()
        if self.drafter.samples and not self.sequences[0].greedy:
            for s in self.sequences:
                s.draft_sampler = s.sampler.draft_sampler(s.ids, self.runner.vocab_size, s.index)

    def open(self) -> KVStore:
        """Checks that everything fits and takes the memory, before any work.

        Raises:
            PromptError: an empty prompt.
            ContextError: prompt and budget exceed the target's context.
            MemoryBudgetError: the cache does not fit the free memory.
        """
        limit = self.runner.context_length
        for s in self.sequences:
            if not s.prompt:
                raise PromptError("The prompt is empty. Give at least one token.")
            if len(s.prompt) + s.max_new_tokens > limit:
                raise ContextError(
                    f"The prompt has {len(s.prompt)} tokens; with {s.max_new_tokens} new ones that is "
                    f"{len(s.prompt) + s.max_new_tokens}, and the model's context holds {limit}. Shorten the prompt, "
                    f"lower max_new_tokens, or stretch the context with rope_factor (YaRN) when loading."
                )
        nodes = self.drafter.max_nodes
        longest = max(len(s.prompt) + s.max_new_tokens for s in self.sequences)
        capacity = longest + nodes + self.schedule.extra_rows(nodes)
        with self.runner.lock:
            self.runner.refresh()
            layers = self.drafter.feature_layers(self.runner) or self.cache.feature_layers
            new_store = partial(self.runner.new_store, feature_layers=layers)
            store = self.cache.open(new_store, [s.prompt for s in self.sequences], capacity, layers)
            self._opened = self.cache.opened
            return store

    def steps(self, store: KVStore) -> Steps:
        """Runs to the end, a step for each sequence and round. Closing the iterator leaves the cache usable.

        Raises:
            CapabilityError: another run has taken the cache.
        """
        return Steps(self, self._steps(store))

    def leave_cache(self) -> None:
        """Tells the cache nothing of this run when it ends."""
        self._opened = -1

    def _steps(self, store: KVStore) -> Generator[Step, None, None]:
        self.drafter.bind(self.runner, store)
        queries = self.drafter.query_layers(self.runner)
        self.schedule.open(self.runner, store, self.sequences, self.drafter.max_nodes, queries)
        try:
            for s in self.sequences:
                yield from self._prefill(s, store, Taps(queries=queries))
            while batch := [s for s in self.sequences if s.finish_reason is None]:
                if self.cancelled():
                    yield from (self._cancel(s) for s in batch)
                    return
                start, forwards = time.perf_counter(), self.drafter.forwards
                events = self._round(batch)
                seconds = time.perf_counter() - start
                if self._plan is not None:
                    drafting = self._drafted - start
                    self._plan.observe(events, self.drafter.forwards - forwards, drafting, seconds - drafting)
                for stats, event in zip((self.stats[s.index] for s in batch), events, strict=True):
                    stats.count(event)
                # The first of a round's steps carries its seconds.
                for i, (s, event) in enumerate(zip(batch, events, strict=True)):
                    yield step_of(s, event, 0.0 if i else seconds)
                self._check_cache()
        finally:
            for s in self.sequences:
                if self.cache.opened == self._opened:  # else its rows are another run's by now
                    self.schedule.close(s)
                    self.cache.remember(s.slot, s.tokens)
                self.drafter.release(s)

    def _round(self, batch: list[Sequence]) -> list[Event]:
        """One verification of every sequence of a batch. Whatever is counted, timed or learned of it follows events."""
        trees = self._propose([self.schedule.seen(s) for s in batch])
        self._drafted = time.perf_counter()
        events = []
        for verified in self.schedule.verify(batch, trees):
            walker = verified.walker
            accepted = accept(verified.tree, verified.logits, walker.sampler, walker.ids, self._emitter(walker))
            event = self.schedule.commit(verified, accepted)
            self.drafter.observe(event)
            events.append(event)
        return events

    def _propose(self, batch: list[Sequence]) -> list[TokenTree]:
        """A tree for each sequence: a root alone where it is over as far as its drafter can see, or nothing pays."""
        budget = None if self._plan is None else self._plan.budget(batch)
        roots = {s.index: TokenTree((s.output[-1],), (-1,)) for s in batch}
        going = [s for s in batch if s.finish_reason is None]
        if budget is not None and not self.drafter.free:
            going = budget.choose(going, [roots[s.index] for s in going])
        proposed = zip(going, self.drafter.propose(going, budget) if going else [], strict=True)
        # A path of depth k emits k + 1 tokens: deeper nodes than may be emitted are not worth verifying.
        found = {s.index: tree.limited(s.remaining - 1) for s, tree in proposed}
        trees = [found.get(s.index, roots[s.index]) for s in batch]
        return trees if self._plan is None else self._plan.prune(trees)

    def _check_cache(self) -> None:
        if self.cache.opened != self._opened:
            raise CapabilityError(
                "Another run has taken this run's PromptCache before it had ended. Give runs that take turns a cache "
                "each, or finish or close one before the next begins."
            )

    def _prefill(self, s: Sequence, store: KVStore, taps: Taps) -> Iterator[Step]:
        """Reads the prompt in pieces; its last logits give the first token.

        Pieces end at multiples of :attr:`chunk`, whoever drafts: rows that are read together get the same bits in every
        method.

        Args:
            taps: for the prompt's last tokens, as many as the drafter's query window.
        """
        window = self.drafter.query_window
        looked: dict[int, list[torch.Tensor]] = {layer: [] for layer in taps.queries}
        while (done := store.lengths[s.slot]) < len(s.prompt):
            if self.cancelled():
                yield self._cancel(s)
                return
            start = time.perf_counter()
            read = min(len(s.prompt), (done // self.chunk + 1) * self.chunk)
            last = read == len(s.prompt)
            out = self.runner.forward(
                [s.prompt[done:read]],
                store,
                [s.slot],
                logits="last" if last else "none",
                taps=taps if read > len(s.prompt) - window else NO_TAPS,
                prompt=True,
            )
            store.commit(s.slot, range(read - done))
            for layer, q in out.queries.items():
                looked[layer].append(q[0])
            emitted: tuple[int, ...] = ()
            if last:
                assert out.logits is not None
                root = TokenTree((s.prompt[-1],), (-1,))
                emitted = accept(root, out.logits[0], s.sampler, s.ids, self._emitter(s)).tokens
                queries = {layer: torch.cat(q, dim=1)[:, -window:] for layer, q in looked.items()}
                self.drafter.observe(
                    Event(self.schedule.seen(s), root, emitted=emitted, mode="prefill", queries=queries)
                )
            seconds = time.perf_counter() - start
            yield Step(s.index, emitted, 0, 0, 0, "prefill", seconds, read, s.finish_reason)
            self._check_cache()

    def _emitter(self, s: Sequence) -> Callable[[int], bool]:
        """Appends each emitted token and says whether it was the last."""

        def emit(token: int) -> bool:
            s.append(token)
            reasons = (rule(s) for rule in self.rules)
            s.finish_reason = next((r for r in reasons if r), None) or ("length" if not s.remaining else None)
            return s.finish_reason is not None

        return emit

    def _cancel(self, s: Sequence) -> Step:
        s.finish_reason = "cancelled"
        return Step(s.index, (), 0, 0, 0, "full", 0.0, len(s.prompt), s.finish_reason)


class Steps(Iterator[Step]):
    """The steps of a run. Each is made under the lock of the target, which is free between them.

    Args:
        engine: of the run. made: makes them.
    """

    def __init__(self, engine: Engine, made: Generator[Step, None, None]) -> None:
        self._engine, self._made = engine, made

    @property
    def _lock(self) -> FairLock:
        return self._engine.runner.lock

    def __next__(self) -> Step:
        with self._lock:
            return next(self._made)

    def close(self) -> None:
        """Ends the run where it is."""
        with self._lock:
            self._made.close()

    def __del__(self) -> None:
        # The garbage collector ends a run that was left lying about. It may do so anywhere, so it must not wait; a
        # cache that does not hear of the run's end knows less of what it holds, and nothing wrong.
        if not self._lock.take_if_free():
            self._engine.leave_cache()
            return
        try:
            self._made.close()
        finally:
            self._lock.release()
