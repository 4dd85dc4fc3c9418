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

from longdraft.engine.accept import accept_path, sample_target_tokens
from longdraft.engine.drafter import Drafter, Plan, Planner
from longdraft.engine.grammar import count_forced_tokens, fit_to_grammar
from longdraft.engine.prefill import Prefiller, default_chunk_size
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.engine.stats import Step, make_step
from longdraft.engine.verifier import Verifier
from longdraft.errors import CapabilityError, ContextError, MemoryBudgetError, PromptError, memory_checked
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model import support
from longdraft.model.outputs import Taps, model_name
from longdraft.model.round_profiler import profiled
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import TokenTree

logger = logging.getLogger("longdraft")


class Engine:
    """Decodes sequences, as many at a time as there are slots.

    Args:
        runner: the target.
        drafter: proposes trees.
        verifier: verifies them; None: always on the whole cache.
        cache: holds the KV, some of it perhaps from earlier runs; None: a cache of the engine's own.
        planner: decides how much to draft and to verify; None: trees have the drafter's own sizes.
        slots: sequences decoded at a time; fewer if memory does not hold the KV of so many.
        capacity: tokens of the longest text (prompt and output) that memory is first taken for, if no waiting text is
            longer. A longer text that comes later waits until nobody decodes, and then has more memory taken.
        chunk_size: prompt tokens read between two rounds, and at most in one forward; None: 1,024, on a GPU mostly 4,096.
    """

    def __init__(
        self,
        runner: TargetRunner,
        drafter: Drafter,
        verifier: Verifier | None = None,
        cache: PromptCache | None = None,
        planner: Planner | None = None,
        *,
        slots: int = 1,
        capacity: int = 0,
        chunk_size: int | None = None,
    ) -> None:
        self.runner, self.drafter, self.verifier = runner, drafter, verifier or Verifier()
        self._keeps_outputs = cache is not None
        self.cache = PromptCache() if cache is None else cache
        self._model, self.planner, self.slots = runner.model, planner, slots  # a model that may decode is kept
        self.chunk_size = default_chunk_size(runner) if chunk_size is None else chunk_size
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

    def _round(self, batch: list[Sequence]) -> list[RoundResult]:
        """Drafts, verifies and commits once for every sequence of a batch."""
        clock = self.runner.profiler
        with profiled(clock, "draft"):
            trees = self._propose(batch)
        trees = trees if self._plan is None else self._plan.prune(trees)
        self._drafting_ended = time.perf_counter()
        self.verifier.query_layers = self._query_layers if self.drafter.needs_queries(batch) else ()
        with profiled(clock, "forward"):
            verified = self.verifier.verify(batch, trees)  # one target forward
        decided = sample_target_tokens([(v.tree, v.logits, v.sequence.sampler) for v in verified], self.runner.model)
        round_results = []
        for v, tokens in zip(verified, decided, strict=True):
            accepted = accept_path(v.tree, v.logits, v.sequence.sampler, v.sequence.input_ids, v.sequence.emit, tokens)
            with profiled(clock, "commit"):
                round_result = self.verifier.commit(v, accepted)
            with profiled(clock, "draft"):
                self.drafter.observe(round_result)
            round_results.append(round_result)
        return round_results

    def _propose(self, batch: list[Sequence]) -> list[TokenTree]:
        """Returns a tree for each sequence: only the root if its text is about to end, or if drafting would not pay."""
        most = self.drafter.max_nodes
        lengths = [self.verifier.kv_len(s) for s in batch]
        limit = None if self._plan is None else count_forced_tokens(self._plan.node_limit(batch, lengths), most)
        roots = {s.index: TokenTree((s.output[-1],), (-1,)) for s in batch}
        chosen = [s for s in batch if s.finish_reason is None]
        if limit is not None and not self.drafter.free:
            chosen = limit.select_sequences(chosen, [roots[s.index] for s in chosen])
        trees = self.drafter.propose(chosen, limit) if chosen else []
        drafted = roots | {s.index: tree for s, tree in zip(chosen, trees, strict=True)}
        # A path of depth k emits k + 1 tokens: deeper nodes than may be emitted are not worth verifying.
        trees = [fit_to_grammar(drafted[s.index], s, most).limit_depth(s.remaining - 1) for s in batch]
        if self.runner.fixed_batch_rows is not None:  # nor are nodes that take a forward more
            trees = [tree.keep_best(self.runner.fixed_batch_rows - 1) for tree in trees]
        return trees

    def _decode(self, batch: list[Sequence]) -> list[Step]:
        """Makes a round; counting, timing and the planner's learning follow its events."""
        start, forwards = time.perf_counter(), self.drafter.forwards
        round_results = self._round(batch)
        seconds = time.perf_counter() - start
        if self._plan is not None:
            drafting = self._drafting_ended - start
            self._plan.observe(round_results, self.drafter.forwards - forwards, drafting, seconds - drafting)
        for round_result in round_results:
            stats = round_result.sequence.stats
            stats.rounds += 1
            stats.drafted += round_result.tree.num_draft_tokens
            stats.accepted += round_result.num_accepted
            if round_result.mode == "partial":
                stats.partial_rounds += 1
                stats.partial_tokens += len(round_result.new_token_ids)
        # The first of a round's steps carries its seconds.
        return [make_step(round_result, 0.0 if i else seconds) for i, round_result in enumerate(round_results)]

    # --- requests ---

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, which joins as soon as a slot is free. Its index must be new to this engine.

        Errors of this and of :meth:`step` are those of :class:`~longdraft.engine.session.Session`.
        """
        limit, s = self.runner.max_context_length(len(sequence.prompt)), sequence
        if not s.prompt:
            raise PromptError("The prompt is empty. Give at least one token.")
        if s.max_length > limit:
            raise ContextError(
                f"The prompt has {len(s.prompt)} tokens; with {s.max_new_tokens} new ones that is {s.max_length}, and "
                f"{model_name(self.runner.model)} decodes {limit} (its context, or the length at which LongRoPE changes "
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
    def unfinished(self) -> set[int]:
        """The sequences of which a step is still to come, by index."""
        return {s.index for s in (*self._active, *self._waiting)} | {step.sequence for step in self._unreported}

    def run(self) -> Iterator[Step]:
        """Steps until all sequences have ended."""
        while self.unfinished:
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
                reading = [s for s in self._active if self._prompts.in_prefill(s)]
                decoding = [s for s in self._active if not self._prompts.in_prefill(s)]
                self._read_last = bool(reading) and not (decoding and self._read_last)
                if self._read_last:
                    steps += self._prompts.prefill(reading)
                elif decoding:
                    steps += self._decode(decoding)
                for s in [s for s in self._active if s.finish_reason is not None]:
                    self._leave(s)
                return steps
            except BaseException:
                self.close()
                if self.cache.open_count == self._opened and self._store.states:
                    self.cache.clear()  # a forward that ended early has changed some layers' states
                raise

    def close(self) -> None:
        """Ends all sequences where they are. The cache stays usable."""
        with self.runner.lock:
            self._waiting.clear()
            self._unreported.clear()
            for s in list(self._active):
                self._leave(s)

    # --- slots and memory ---

    def capture_graphs(self, on_progress: Callable[[float], None] = lambda share: None) -> int:
        """Takes the memory and records verifications, where forwards are recorded; returns the number of sizes.

        Nothing may be decoded yet. ``on_progress`` is called with the share of the work that is over.
        """
        with self.runner.lock:
            if self._opened < 0:
                self._open()
            return self.runner.capture_graphs(
                self._store, self.drafter.max_nodes + 1, Taps(queries=self._query_layers), on_progress
            )

    def _admit(self) -> None:
        """Gives free slots to waiting sequences."""
        while self._waiting:
            s = self._waiting[0]
            # A model that was changed between two requests, such as by another adapter, has other rows.
            if not self._active and (
                self._opened < 0 or s.max_length > self._capacity or self._target != self.runner.synced_fingerprint()
            ):
                self._open()
            if not self._free or s.max_length > self._capacity:
                return
            s.slot = self.cache.choose_slot(self._free, s.prompt[:-1], self.runner.rope_regime(len(s.prompt)))
            self._free.remove(s.slot)
            self._active.append(self._waiting.popleft())

    def _leave(self, s: Sequence) -> None:
        if s in self._waiting:
            self._waiting.remove(s)
            return
        self._active.remove(s)
        self._free.append(s.slot)
        started = self._prompts.discard(s) or bool(s.output)
        # A sequence that was never started leaves its slot's contents unchanged. If another run has taken the cache,
        # the rows belong to that run.
        if started and self.cache.open_count == self._opened:
            self.verifier.release(s)
            # The engine's own cache reuses rows of prompts only: an output's were not computed in whole pieces.
            self.cache.record_tokens(s.slot, s.tokens if self._keeps_outputs else s.prompt)
        self.drafter.release(s)

    def _open(self) -> None:
        """Takes memory for the waiting sequences and binds drafter and schedule to it.

        Raises:
            MemoryBudgetError: it does not hold a single one.
        """
        runner, nodes = self.runner, self.drafter.max_nodes
        self._target = runner.synced_fingerprint()
        # A store that was too small is made larger by half, or every longer text would need another.
        larger = min(3 * self._capacity // 2, runner.context_length) if self._opened >= 0 else self._capacity
        capacity = max([larger, *(s.max_length for s in self._waiting)])
        beside = nodes + self.verifier.num_extra_entries(nodes)
        layers = self.drafter.feature_layers(runner) or self.cache.feature_layers
        new_store = partial(runner.new_store, feature_layers=layers)
        rows, slots = capacity + beside, self.slots
        while True:
            try:
                store = self.cache.open(new_store, slots, rows, layers, runner.store_kind, self._target)
                self._store, self._query_layers = store, self.drafter.query_layers(runner)
                self.drafter.bind(runner, store)
                self.verifier.bind(runner, store, nodes, self._query_layers)
                keeps = self._keeps_outputs
                self._prompts = Prefiller(runner, self.drafter, self.cache, store, self.chunk_size, keeps)
                if runner.tp_rank is not None:
                    runner.tp_rank.check_views(bool(self.drafter.views or self.verifier.views or self._query_layers))
                break
            except MemoryBudgetError:
                if slots == 1 or self._keeps_outputs:
                    raise
                logger.warning("There is no memory for %d sequences at a time: %d are decoded.", slots, slots // 2)
                slots, self.cache = slots // 2, PromptCache()
        self._capacity, self._opened = capacity, self.cache.open_count
        self._free = list(range(slots))
        if self.planner is not None:
            self._plan = self.planner.start(self.drafter)

    def _check_cache(self) -> None:
        if self._opened < 0 or self.cache.open_count == self._opened:
            return
        self._opened = -1
        if self._active:
            raise CapabilityError(
                "Another run has taken this run's PromptCache before it had ended. Give runs that take turns a cache "
                "each, or finish or close one before the next begins."
            )
