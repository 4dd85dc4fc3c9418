"""The decoding loop. Every method is this loop with other parts in it: read :meth:`Engine._round` first.

Requests come and go between rounds. A request waits until a slot is free. Its prompt is read in pieces that take turns
with the rounds of the others. When it has ended, the next request takes its slot.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from longdraft.engine.accept import accept, decide
from longdraft.engine.drafter import Drafter, Plan, Planner
from longdraft.engine.event import Event
from longdraft.engine.grammar import fitted, with_grammars
from longdraft.engine.prompts import Prompts, prefill_chunk
from longdraft.engine.schedule import Schedule
from longdraft.engine.sequence import Sequence
from longdraft.engine.stats import Step, step_of
from longdraft.errors import CapabilityError, ContextError, MemoryBudgetError, PromptError, memory_checked
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model import support
from longdraft.model.clock import around
from longdraft.model.outputs import Taps, name_of
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import TokenTree

logger = logging.getLogger("longdraft")


class Engine:
    """Decodes sequences, as many at a time as there are slots.

    Args:
        runner: the target.
        drafter: proposes trees.
        schedule: verifies them; None: always on the whole cache.
        cache: holds the KV, some of it perhaps from earlier runs; None: a cache of the engine's own.
        planner: decides how much to draft and to verify; None: trees have the drafter's own sizes.
        slots: sequences decoded at a time; fewer if memory does not hold the KV of so many.
        capacity: tokens of the longest text (prompt and output) that memory is first taken for, if no waiting text is
            longer. A longer text that comes later waits until nobody decodes, and then has more memory taken.
        chunk: prompt tokens read between two rounds, and at most in one forward; None: 1,024, on a GPU mostly 4,096.
    """

    def __init__(
        self,
        runner: TargetRunner,
        drafter: Drafter,
        schedule: Schedule | None = None,
        cache: PromptCache | None = None,
        planner: Planner | None = None,
        *,
        slots: int = 1,
        capacity: int = 0,
        chunk: int | None = None,
    ) -> None:
        self.runner, self.drafter, self.schedule = runner, drafter, schedule or Schedule()
        self._keeps_outputs = cache is not None
        self.cache = PromptCache() if cache is None else cache
        self._model, self.planner, self.slots = runner.model, planner, slots  # a model that may decode is kept
        self.chunk = prefill_chunk(runner) if chunk is None else chunk
        self._capacity = capacity
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []  # those that have a slot, in the order in which they came
        self._free: list[int] = []  # slots
        self._unreported: list[Step] = []  # of aborted sequences
        self._plan: Plan | None = None
        self._drafting_ended = 0.0  # a time on the clock
        self._opened = -1  # the cache's count of runs when this one opened it
        self._read_last = False
        self._target = ""  # fingerprint of the target when the cache was opened
        if planner is not None:
            self.drafter.use_planner()

    # --- a round ---

    def _round(self, batch: list[Sequence]) -> list[Event]:
        """Drafts, verifies and commits once for every sequence of a batch."""
        clock = self.runner.clock
        with around(clock, "draft"):
            trees = self._propose(batch)
        trees = trees if self._plan is None else self._plan.prune(trees)
        self._drafting_ended = time.perf_counter()
        self.schedule.query_layers = self._query_layers if self.drafter.reads_queries(batch) else ()
        with around(clock, "forward"):
            verified = self.schedule.verify(batch, trees)  # one target forward
        decided = decide([(v.tree, v.logits, v.sequence.sampler) for v in verified], self.runner.model)
        events = []
        for v, tokens in zip(verified, decided, strict=True):
            accepted = accept(v.tree, v.logits, v.sequence.sampler, v.sequence.ids, v.sequence.emit, tokens)
            with around(clock, "commit"):
                event = self.schedule.commit(v, accepted)
            with around(clock, "draft"):
                self.drafter.observe(event)
            events.append(event)
        return events

    def _propose(self, batch: list[Sequence]) -> list[TokenTree]:
        """Returns a tree for each sequence: only the root if its text is about to end, or if drafting would not pay."""
        most = self.drafter.max_nodes
        lengths = [self.schedule.length(s) for s in batch]
        limit = None if self._plan is None else with_grammars(self._plan.node_limit(batch, lengths), most)
        roots = {s.index: TokenTree((s.output[-1],), (-1,)) for s in batch}
        chosen = [s for s in batch if s.finish_reason is None]
        if limit is not None and not self.drafter.free:
            chosen = limit.choose(chosen, [roots[s.index] for s in chosen])
        trees = self.drafter.propose(chosen, limit) if chosen else []
        drafted = roots | {s.index: tree for s, tree in zip(chosen, trees, strict=True)}
        # A path of depth k emits k + 1 tokens: deeper nodes than may be emitted are not worth verifying.
        trees = [fitted(drafted[s.index], s, most).limited(s.remaining - 1) for s in batch]
        if self.runner.rows is not None:  # nor are nodes that take a forward more
            trees = [tree.best(self.runner.rows - 1) for tree in trees]
        return trees

    def _decode(self, batch: list[Sequence]) -> list[Step]:
        """Makes a round; counting, timing and the planner's learning follow its events."""
        start, forwards = time.perf_counter(), self.drafter.forwards
        events = self._round(batch)
        seconds = time.perf_counter() - start
        if self._plan is not None:
            drafting = self._drafting_ended - start
            self._plan.observe(events, self.drafter.forwards - forwards, drafting, seconds - drafting)
        for event in events:
            stats = event.sequence.stats
            stats.rounds += 1
            stats.drafted += event.tree.drafted
            stats.accepted += event.accepted
            if event.mode == "partial":
                stats.partial_rounds += 1
                stats.partial_tokens += len(event.emitted)
        # The first of a round's steps carries its seconds.
        return [step_of(event, 0.0 if i else seconds) for i, event in enumerate(events)]

    # --- requests ---

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, which joins as soon as a slot is free. Its index must be new to this engine.

        Errors of this and of :meth:`step` are those of :class:`~longdraft.engine.session.Session`.
        """
        limit, s = self.runner.longest_text(len(sequence.prompt)), sequence
        if not s.prompt:
            raise PromptError("The prompt is empty. Give at least one token.")
        if s.longest > limit:
            raise ContextError(
                f"The prompt has {len(s.prompt)} tokens; with {s.max_new_tokens} new ones that is {s.longest}, and "
                f"{name_of(self.runner.model)} decodes {limit} (its context, or the length at which LongRoPE changes "
                "all rows). Shorten the prompt, ask for fewer new tokens, or load the model with a rope_factor (YaRN), "
                "which stretches its context."
            )
        self._waiting.append(s)

    def abort(self, index: int) -> None:
        """Ends a sequence where it is; the next step reports it. Has no effect on one that has ended already."""
        with self.runner.lock:
            for s in [*self._active, *self._waiting]:
                if s.index == index:
                    s.finish_reason = "cancelled"
                    self._unreported.append(Step(s.index, (), 0, 0, 0, "full", 0.0, len(s.prompt), s.finish_reason))
                    self._leave(s)

    @property
    def held(self) -> set[int]:
        """The sequences of which a step is still to come, by index."""
        return {s.index for s in (*self._active, *self._waiting)} | {step.sequence for step in self._unreported}

    def run(self) -> Iterator[Step]:
        """Steps until all sequences have ended."""
        while self.held:
            yield from self.step()

    def step(self) -> list[Step]:
        """Reads prompts for a while, or makes a round of all sequences that decode: the two take turns.

        Returns a step for each sequence concerned.
        """
        support.check_autocast(self.runner.device)
        with self.runner.lock, memory_checked():
            try:
                self._check_cache()
                self._admit()
                steps, self._unreported = self._unreported, []
                reading = [s for s in self._active if self._prompts.pending(s)]
                decoding = [s for s in self._active if not self._prompts.pending(s)]
                self._read_last = bool(reading) and not (decoding and self._read_last)
                if self._read_last:
                    steps += self._prompts.read(reading)
                elif decoding:
                    steps += self._decode(decoding)
                for s in [s for s in self._active if s.finish_reason is not None]:
                    self._leave(s)
                return steps
            except BaseException:
                self.close()
                if self.cache.opened == self._opened and self._store.states:
                    self.cache.forget()  # a forward that ended early has changed some layers' states
                raise

    def close(self) -> None:
        """Ends all sequences where they are. The cache stays usable."""
        with self.runner.lock:
            self._waiting.clear()
            self._unreported.clear()
            for s in list(self._active):
                self._leave(s)

    # --- slots and memory ---

    def record(self, done: Callable[[float], None] = lambda share: None) -> int:
        """Takes the memory and records verifications, where forwards are recorded; returns the number of sizes.

        Nothing may be decoded yet. ``done`` is called with the share of the work that is over.
        """
        with self.runner.lock:
            if self._opened < 0:
                self._open()
            return self.runner.record(self._store, self.drafter.max_nodes + 1, Taps(queries=self._query_layers), done)

    def _admit(self) -> None:
        """Gives free slots to waiting sequences."""
        while self._waiting:
            s = self._waiting[0]
            # A model that was changed between two requests, such as by another adapter, has other rows.
            if not self._active and (
                self._opened < 0 or s.longest > self._capacity or self._target != self.runner.refreshed_fingerprint()
            ):
                self._open()
            if not self._free or s.longest > self._capacity:
                return
            s.slot = self.cache.choose(self._free, s.prompt[:-1], self.runner.rows_kind(len(s.prompt)))
            self._free.remove(s.slot)
            self._active.append(self._waiting.popleft())

    def _leave(self, s: Sequence) -> None:
        if s in self._waiting:
            self._waiting.remove(s)
            return
        self._active.remove(s)
        self._free.append(s.slot)
        started = self._prompts.forget(s) or bool(s.output)
        # A sequence that was never started leaves its slot's contents unchanged. If another run has taken the cache,
        # the rows belong to that run.
        if started and self.cache.opened == self._opened:
            self.schedule.close(s)
            # The engine's own cache reuses rows of prompts only: an output's were not computed in whole pieces.
            self.cache.remember(s.slot, s.tokens if self._keeps_outputs else s.prompt)
        self.drafter.release(s)

    def _open(self) -> None:
        """Takes memory for the waiting sequences and binds drafter and schedule to it.

        Raises:
            MemoryBudgetError: it does not hold a single one.
        """
        runner, nodes = self.runner, self.drafter.max_nodes
        self._target = runner.refreshed_fingerprint()
        # A store that was too small is made larger by half, or every longer text would need another.
        larger = min(3 * self._capacity // 2, runner.context_length) if self._opened >= 0 else self._capacity
        capacity = max([larger, *(s.longest for s in self._waiting)])
        beside = nodes + self.schedule.extra_rows(nodes)
        layers = self.drafter.feature_layers(runner) or self.cache.feature_layers
        new_store = partial(runner.new_store, feature_layers=layers)
        rows, slots = capacity + beside, self.slots
        while True:
            try:
                store = self.cache.open(new_store, slots, rows, layers, runner.store_kind, self._target)
                self._store, self._query_layers = store, self.drafter.query_layers(runner)
                self.drafter.bind(runner, store)
                self.schedule.open(runner, store, nodes, self._query_layers)
                keeps = self._keeps_outputs
                self._prompts = Prompts(runner, self.drafter, self.cache, store, self.chunk, keeps)
                if runner.share is not None:
                    runner.share.check_looks(bool(self.drafter.views or self.schedule.views or self._query_layers))
                break
            except MemoryBudgetError:
                if slots == 1 or self._keeps_outputs:
                    raise
                logger.warning("There is no memory for %d sequences at a time: %d are decoded.", slots, slots // 2)
                slots, self.cache = slots // 2, PromptCache()
        self._capacity, self._opened = capacity, self.cache.opened
        self._free = list(range(slots))
        if self.planner is not None:
            self._plan = self.planner.start(self.drafter)

    def _check_cache(self) -> None:
        if self._opened < 0 or self.cache.opened == self._opened:
            return
        self._opened = -1
        if self._active:
            raise CapabilityError(
                "Another run has taken this run's PromptCache before it had ended. Give runs that take turns a cache "
                "each, or finish or close one before the next begins."
            )
