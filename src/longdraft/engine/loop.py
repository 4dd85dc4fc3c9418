"""The decoding loop with continuous batching. All methods share this loop: read :meth:`Engine._round` first.

A request waits for a free slot of the KV cache. Then the chunked prefill of the request alternates with decoding rounds
of earlier requests. When a request has finished, the next waiting request takes the slot.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from longdraft.engine.accept import accept_path, sample_target_tokens
from longdraft.engine.drafter import Drafter, Plan, Planner
from longdraft.engine.grammar import fit_to_grammar, with_forced_tokens
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
    """Decodes sequences, as many at a time as the KV cache has slots.

    Args:
        runner: the target.
        drafter: proposes trees.
        verifier: verifies the trees; None: always on the full KV cache.
        cache: the user's prompt cache, which allocates the KV store and reuses earlier prefixes; None: a new one.
        planner: decides how much to draft and to verify; None: trees have the drafter's default sizes.
        slots: maximum number of sequences decoded at a time; halved until their KV fits the memory.
        capacity: context length (prompt and output) of the first allocation; more if a waiting sequence is longer. A
            longer sequence that arrives later waits until no sequence is active; then more memory is allocated.
        chunk_size: most prompt tokens in a forward, and between two decoding rounds; None: :func:`default_chunk_size`.
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
        self._reuses_outputs = cache is not None  # only a user's cache keeps the KV of outputs
        self.cache = PromptCache() if cache is None else cache
        self._model, self.planner, self.slots = runner.model, planner, slots  # the runner may hold the model weakly
        self.chunk_size = default_chunk_size(runner) if chunk_size is None else chunk_size
        self._capacity = capacity
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []  # sequences with a slot, in order of arrival
        self._aborted_steps: list[Step] = []  # last steps of aborted sequences, which step() has not returned yet
        self._draft_end = 0.0  # perf_counter at the end of the last drafting
        self._last_step_was_prefill = False
        # _open sets these, and _store, _prefiller and _query_layers.
        self._free_slots: list[int] = []
        self._plan: Plan | None = None
        self._open_count = -1  # the cache's open_count after this engine opened the cache; -1: not open
        self._fingerprint = ""  # fingerprint of the target when the cache was opened
        if planner is not None:
            self.drafter.use_planner()

    def _round(self, batch: list[Sequence]) -> list[RoundResult]:
        """Drafts and verifies a tree for each sequence of the batch, and commits the accepted path."""
        profiler = self.runner.profiler
        with profiled(profiler, "draft"):
            trees = self._propose(batch)
        trees = trees if self._plan is None else self._plan.prune(trees)
        self._draft_end = time.perf_counter()
        self.verifier.query_layers = self._query_layers if self.drafter.needs_queries(batch) else ()
        with profiled(profiler, "forward"):
            outputs = self.verifier.verify(batch, trees)  # one target forward
        trees_logits = [(output.tree, output.logits, output.sequence.sampler) for output in outputs]
        target_tokens = sample_target_tokens(trees_logits, self.runner.model)
        round_results = []
        for output, tokens in zip(outputs, target_tokens, strict=True):
            s = output.sequence
            path = accept_path(output.tree, output.logits, s.sampler, s.input_ids, s.emit, tokens)
            with profiled(profiler, "commit"):
                round_result = self.verifier.commit(output, path)
            with profiled(profiler, "draft"):
                self.drafter.observe(round_result)
            round_results.append(round_result)
        return round_results

    def _propose(self, batch: list[Sequence]) -> list[TokenTree]:
        """Returns a tree for each sequence: the root alone if the sequence has ended, or drafting is not worthwhile."""
        max_nodes = self.drafter.max_nodes
        kv_lens = [self.verifier.kv_len(s) for s in batch]
        limit = None if self._plan is None else with_forced_tokens(self._plan.node_limit(batch, kv_lens), max_nodes)
        roots = {s.index: TokenTree((s.output[-1],), (-1,)) for s in batch}
        selected = [s for s in batch if s.finish_reason is None]
        if limit is not None and not self.drafter.free:
            selected = limit.select_sequences(selected, [roots[s.index] for s in selected])
        trees = self.drafter.propose(selected, limit) if selected else []
        tree_by_index = roots | {s.index: tree for s, tree in zip(selected, trees, strict=True)}
        # A path to depth k emits k + 1 tokens, so nodes deeper than remaining - 1 need no verification.
        trees = [fit_to_grammar(tree_by_index[s.index], s, max_nodes).limit_depth(s.remaining - 1) for s in batch]
        if self.runner.fixed_batch_rows is not None:  # tokens of a forward; a larger tree would take a second forward
            trees = [tree.keep_best(self.runner.fixed_batch_rows - 1) for tree in trees]
        return trees

    def _decode(self, batch: list[Sequence]) -> list[Step]:
        """Runs a round, updates the statistics and the planner, and returns a step for each sequence."""
        start, num_forwards_before = time.perf_counter(), self.drafter.forwards
        round_results = self._round(batch)
        seconds = time.perf_counter() - start
        if self._plan is not None:
            draft_seconds = self._draft_end - start
            num_forwards = self.drafter.forwards - num_forwards_before
            self._plan.observe(round_results, num_forwards, draft_seconds, seconds - draft_seconds)
        for round_result in round_results:
            stats = round_result.sequence.stats
            stats.rounds += 1
            stats.drafted += round_result.tree.num_draft_tokens
            stats.accepted += round_result.num_accepted
            if round_result.mode == "partial":
                stats.partial_rounds += 1
                stats.partial_tokens += len(round_result.new_token_ids)
        # Only the first step has the round's seconds, because callers add up the seconds of all steps.
        return [make_step(round_result, 0.0 if i else seconds) for i, round_result in enumerate(round_results)]

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence with a new index; raises the errors of :meth:`longdraft.engine.session.Session.add`."""
        max_length, s = self.runner.max_context_length(len(sequence.prompt)), sequence
        if not s.prompt:
            raise PromptError("The prompt is empty. Give at least one token.")
        if s.max_length > max_length:
            raise ContextError(
                f"The prompt has {len(s.prompt)} tokens; with {s.max_new_tokens} new ones that is {s.max_length}, and "
                f"{model_name(self.runner.model)} decodes {max_length} (its context, or the length at which LongRoPE "
                "switches its factors). Shorten the prompt, ask for fewer new tokens, or load the model with a "
                "rope_factor (YaRN), which stretches its context."
            )
        self._waiting.append(s)

    def abort(self, index: int) -> None:
        """Cancels a sequence that has not finished; the next :meth:`step` returns the sequence's last step."""
        with self.runner.lock:
            for s in [*self._active, *self._waiting]:
                if s.index == index:
                    s.finish_reason = "cancelled"  # in a step without tokens, so all counts are 0
                    self._aborted_steps.append(Step(s.index, (), 0, 0, 0, "full", 0.0, len(s.prompt), s.finish_reason))
                    self._remove(s)

    @property
    def unfinished(self) -> set[int]:
        """The indices of sequences that will get another step."""
        return {s.index for s in (*self._active, *self._waiting)} | {step.sequence for step in self._aborted_steps}

    def run(self) -> Iterator[Step]:
        """Calls :meth:`step` until all sequences have finished, and yields the steps."""
        while self.unfinished:
            yield from self.step()

    def step(self) -> list[Step]:
        """Runs either prefill chunks or a decoding round, by turns. Returns a step for each sequence that took part."""
        support.check_autocast(self.runner.device)
        with self.runner.lock, memory_checked():
            try:
                self._check_cache()
                self._admit()
                steps, self._aborted_steps = self._aborted_steps, []
                prefilling = [s for s in self._active if self._prefiller.in_prefill(s)]
                decoding = [s for s in self._active if not self._prefiller.in_prefill(s)]
                is_prefill = bool(prefilling) and not (decoding and self._last_step_was_prefill)
                self._last_step_was_prefill = is_prefill
                if is_prefill:
                    steps += self._prefiller.prefill(prefilling)
                elif decoding:
                    steps += self._decode(decoding)
                for s in [s for s in self._active if s.finish_reason is not None]:
                    self._remove(s)
                return steps
            except BaseException:
                self.close()
                if self.cache.open_count == self._open_count and self._store.states:
                    self.cache.clear()  # an interrupted forward may have advanced the states of only some layers
                raise

    def close(self) -> None:
        """Cancels all sequences. The cache stays usable."""
        with self.runner.lock:
            self._waiting.clear()
            self._aborted_steps.clear()
            for s in list(self._active):
                self._remove(s)

    def capture_graphs(self, on_progress: Callable[[float], None] = lambda fraction: None) -> int:
        """Captures CUDA graphs of verification forwards. Returns their number; ``on_progress`` gets fractions of 1."""
        with self.runner.lock:
            if self._open_count < 0:
                self._open()
            taps = Taps(queries=self._query_layers)
            return self.runner.capture_graphs(self._store, self.drafter.max_nodes + 1, taps, on_progress)

    def _admit(self) -> None:
        """Gives free slots to waiting sequences."""
        while self._waiting:
            s = self._waiting[0]
            # If the model has changed since the last request, for example by an adapter, the old KV is invalid.
            if not self._active and (
                self._open_count < 0
                or s.max_length > self._capacity
                or self._fingerprint != self.runner.synced_fingerprint()
            ):
                self._open()
            if not self._free_slots or s.max_length > self._capacity:
                return
            s.slot = self.cache.choose_slot(self._free_slots, s.prompt[:-1], self.runner.rope_regime(len(s.prompt)))
            self._free_slots.remove(s.slot)
            self._active.append(self._waiting.popleft())

    def _remove(self, s: Sequence) -> None:
        """Takes a sequence out of the queue, or frees its slot and records which KV the slot holds."""
        if s in self._waiting:
            self._waiting.remove(s)
            return
        self._active.remove(s)
        self._free_slots.append(s.slot)
        started = self._prefiller.discard(s) or bool(s.output)
        # A sequence that never started wrote no KV. If another run has opened the cache, the slot belongs to that run.
        if started and self.cache.open_count == self._open_count:
            self.verifier.release(s)
            # The engine's own cache keeps only prompts: the KV of outputs was not computed in full chunks, so the last
            # bits may differ.
            self.cache.record_tokens(s.slot, s.tokens if self._reuses_outputs else s.prompt)
        self.drafter.release(s)

    def _open(self) -> None:
        """Allocates a KV store for the waiting sequences, and binds drafter and verifier to the store.

        Raises:
            MemoryBudgetError: not even one sequence fits.
        """
        runner, max_nodes = self.runner, self.drafter.max_nodes
        self._fingerprint = runner.synced_fingerprint()
        # Grow by half at least. Otherwise each slightly longer sequence would need a new store.
        min_capacity = min(3 * self._capacity // 2, runner.context_length) if self._open_count >= 0 else self._capacity
        capacity = max([min_capacity, *(s.max_length for s in self._waiting)])
        num_scratch = max_nodes + self.verifier.num_extra_entries(max_nodes)
        feature_layers = self.drafter.needs(runner).feature_layers or self.cache.feature_layers
        new_store = partial(runner.new_store, feature_layers=feature_layers)
        num_entries, slots = capacity + num_scratch, self.slots
        while True:
            try:
                store = self.cache.open(
                    new_store, slots, num_entries, feature_layers, runner.store_compat_key, self._fingerprint
                )
                self.drafter.bind(runner, store)
                needs = self.drafter.needs(runner)
                self._store, self._query_layers = store, needs.query_layers
                self.verifier.bind(runner, store, max_nodes, self._query_layers)
                reuses = self._reuses_outputs
                self._prefiller = Prefiller(runner, self.drafter, self.cache, store, self.chunk_size, reuses)
                if runner.tp_rank is not None:
                    runner.tp_rank.check_views(bool(needs.views or self.verifier.views or needs.query_layers))
                break
            except MemoryBudgetError:
                if slots == 1 or self._reuses_outputs:  # a user's cache is not replaced
                    raise
                logger.warning("There is no memory for %d sequences at a time: decoding %d.", slots, slots // 2)
                slots, self.cache = slots // 2, PromptCache()
        self._capacity, self._open_count = capacity, self.cache.open_count
        self._free_slots = list(range(slots))
        if self.planner is not None:
            self._plan = self.planner.start(self.drafter)

    def _check_cache(self) -> None:
        """Raises CapabilityError if another run has opened the cache while this engine has active sequences."""
        if self._open_count < 0 or self.cache.open_count == self._open_count:
            return
        self._open_count = -1
        if self._active:
            raise CapabilityError(
                "Another run has opened this run's PromptCache while this run was decoding. Give each run its own "
                "PromptCache, or finish or close one run before the next begins."
            )
