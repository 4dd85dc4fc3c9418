"""The decoding loop with continuous batching. All methods share this loop: read :meth:`Engine._decode` first.

A request waits for a free slot of the KV cache. Then the chunked prefill of the request alternates with decoding rounds
of earlier requests. When a request has finished, the next waiting request takes the slot
(:mod:`longdraft.engine.scheduler`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial

from longdraft.engine.accept import AcceptedPath, accept_path, sample_target_tokens
from longdraft.engine.cache_manager import CacheManager
from longdraft.engine.drafter import Drafter
from longdraft.engine.grammar import fit_to_grammar, with_forced_tokens
from longdraft.engine.planner import Planner, RoundPlan
from longdraft.engine.prefill import Prefiller, default_chunk_size
from longdraft.engine.round_result import RoundResult
from longdraft.engine.scheduler import Scheduler
from longdraft.engine.sequence import Sequence
from longdraft.engine.stats import Step, count_round, make_step
from longdraft.engine.verifier import Verifier, VerifyOutput
from longdraft.errors import ContextError, PromptError, memory_checked
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model import support
from longdraft.model.outputs import Taps, model_name
from longdraft.model.round_profiler import profiled
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import TokenTree, root_tree


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
        self._model, self._planner = runner.model, planner  # the runner may hold the model weakly
        self._chunk_size = default_chunk_size(runner) if chunk_size is None else chunk_size
        self.cache_manager = CacheManager(runner, cache, slots, capacity)
        self._scheduler = Scheduler(self.cache_manager)
        self._aborted_steps: list[Step] = []  # last steps of aborted sequences, which step() has not returned yet
        if planner is not None:
            drafter.use_planner()

    def _decode(self, batch: list[Sequence]) -> list[Step]:
        """Runs a round: each sequence of the batch emits at least one token. Returns a step for each sequence."""
        start, num_forwards_before = time.perf_counter(), self.drafter.forwards
        plan = self._plan_round(batch)
        outputs, draft_seconds = self._replay(batch, plan), None
        if outputs is None:
            trees = self._draft(batch, plan)
            draft_seconds = time.perf_counter() - start
            has_drafted = plan is None or self.drafter.forwards > num_forwards_before
            outputs = self._verify(batch, trees, has_drafted)
        paths = self._accept(outputs)
        round_results = self._commit(outputs, paths)
        seconds = time.perf_counter() - start
        if plan is not None:
            plan.observe(round_results, self.drafter.forwards - num_forwards_before, seconds, draft_seconds)
        # Only the first step has the round's seconds, because callers add up the seconds of all steps.
        return [make_step(round_result, 0.0 if i else seconds) for i, round_result in enumerate(round_results)]

    def _plan_round(self, batch: list[Sequence]) -> RoundPlan | None:
        """Plans how much to draft and to verify; None without a planner."""
        if self._planner is None:
            return None
        return RoundPlan(self._planner, self.drafter, batch, [self.verifier.kv_len(s) for s in batch])

    def _replay(self, batch: list[Sequence], plan: RoundPlan | None) -> list[VerifyOutput] | None:
        """Drafts and verifies in one CUDA graph; None if none serves this round."""
        if not self.drafter.replays_rounds or type(self.verifier) is not Verifier or self._query_layers:
            return None
        if plan is None:
            return self.drafter.replay_round(batch)
        drafting = plan.limit.select_sequences(batch, [root_tree(s.output[-1]) for s in batch])
        return self.drafter.replay_round(batch, plan.limit) if len(drafting) == len(batch) else None

    def _draft(self, batch: list[Sequence], plan: RoundPlan | None) -> list[TokenTree]:
        """Returns a tree for each sequence: the root alone if drafting is not worthwhile."""
        max_nodes, fixed_rows = self.drafter.max_nodes, self.runner.fixed_batch_rows
        limit, drafting = None, batch
        tree_by_index = {s.index: root_tree(s.output[-1]) for s in batch}
        with profiled(self.runner.profiler, "draft"):
            if plan is not None:
                limit = with_forced_tokens(plan.limit, max_nodes)
                if not self.drafter.free:
                    drafting = limit.select_sequences(batch, [tree_by_index[s.index] for s in batch])
            drafted = self.drafter.propose(drafting, limit) if drafting else []
            tree_by_index |= {s.index: tree for s, tree in zip(drafting, drafted, strict=True)}
            trees = [fit_to_grammar(tree_by_index[s.index], s, max_nodes).limit_depth(s.max_draft_depth) for s in batch]
            if fixed_rows is not None:  # tokens of a forward; a larger tree would take a second forward
                trees = [tree.keep_best(fixed_rows - 1) for tree in trees]
        return trees if plan is None else plan.prune(trees)

    def _verify(self, batch: list[Sequence], trees: list[TokenTree], has_drafted: bool) -> list[VerifyOutput]:
        """Computes the target's logits at the nodes of each sequence's tree, usually in one forward."""
        # With CUDA graphs queries cost nothing, but a forward without queries needs another graph.
        needs_queries = self.runner.graphs.enabled or self.drafter.needs_queries(batch, has_drafted)
        query_layers = self._query_layers if needs_queries else ()
        with profiled(self.runner.profiler, "forward"):
            return self.verifier.verify(batch, trees, query_layers)

    def _accept(self, outputs: list[VerifyOutput]) -> list[AcceptedPath]:
        """Samples the target's tokens, and emits them to each sequence as far as they are in the sequence's tree."""
        nodes = [(output.tree, output.logits, output.sequence.sampler) for output in outputs]
        target_tokens: SequenceOf[list[int] | None] = [output.target_tokens for output in outputs]
        if None in target_tokens:
            target_tokens = sample_target_tokens(nodes, self.runner.model, [output.maxima for output in outputs])
        return [
            accept_path(tree, logits, sampler, output.sequence.input_ids, output.sequence.emit, tokens)
            for (tree, logits, sampler), output, tokens in zip(nodes, outputs, target_tokens, strict=True)
        ]

    def _commit(self, outputs: list[VerifyOutput], paths: list[AcceptedPath]) -> list[RoundResult]:
        """Commits the KV of the accepted paths, and passes the results to the drafter."""
        profiler, round_results = self.runner.profiler, []
        for output, path in zip(outputs, paths, strict=True):
            with profiled(profiler, "commit"):
                round_result = self.verifier.commit(output, path)
            with profiled(profiler, "update"):
                self.drafter.observe(round_result)
            count_round(round_result)
            round_results.append(round_result)
        return round_results

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
        self._scheduler.waiting.append(s)

    def abort(self, index: int) -> None:
        """Cancels a sequence that has not finished; the next :meth:`step` returns the sequence's last step."""
        with self.runner.lock:
            for s in self._scheduler.sequences:
                if s.index == index:
                    s.finish_reason = "cancelled"  # in a step without tokens, so all counts are 0
                    self._aborted_steps.append(Step(s.index, (), 0, 0, 0, "full", 0.0, len(s.prompt), s.finish_reason))
                    self._remove(s)

    @property
    def unfinished(self) -> set[int]:
        """The indices of sequences that will get another step."""
        return {s.index for s in self._scheduler.sequences} | {step.sequence for step in self._aborted_steps}

    def run(self) -> Iterator[Step]:
        """Calls :meth:`step` until all sequences have finished, and yields the steps."""
        while self.unfinished:
            yield from self.step()

    def step(self) -> list[Step]:
        """Runs either prefill chunks or a decoding round, by turns. Returns a step for each sequence that took part."""
        support.check_autocast(self.runner.device)
        with self.runner.lock, memory_checked():
            try:
                batch, is_prefill = self._scheduler.schedule(self._open_store)
                steps, self._aborted_steps = self._aborted_steps, []
                if batch:
                    steps += self._prefiller.prefill(batch) if is_prefill else self._decode(batch)
                for s in batch:
                    if s.finish_reason is not None:
                        self._remove(s)
                return steps
            except BaseException:
                self.close()
                if self.cache_manager.owns_cache and self._store.states:
                    # An interrupted forward may have advanced the states of only some layers.
                    self.cache_manager.cache.clear()
                raise

    def close(self) -> None:
        """Cancels all sequences. The cache stays usable."""
        with self.runner.lock:
            self._scheduler.waiting.clear()
            self._aborted_steps.clear()
            for s in list(self._scheduler.active):
                self._remove(s)

    def _remove(self, s: Sequence) -> None:
        """Takes a sequence out of the engine. Its slot keeps the KV that later sequences may reuse."""
        if not self._scheduler.remove(s):
            return
        self._prefiller.release(s)
        # A sequence that never started wrote no KV. If another run has opened the cache, the slot is that run's.
        if s.is_started and self.cache_manager.owns_cache:
            self.verifier.release(s)
        self.drafter.release(s)

    def _open_store(self, cache: PromptCache, slots: int, capacity: int, fingerprint: str) -> None:
        """Opens a cache for this run, with space for drafts, and binds drafter, verifier and prefill to its store."""
        runner, drafter, verifier = self.runner, self.drafter, self.verifier
        max_nodes, feature_layers = drafter.max_nodes, drafter.needs(runner).feature_layers or cache.feature_layers
        num_entries = capacity + max_nodes + verifier.num_extra_entries(max_nodes)
        new_store = partial(runner.new_store, feature_layers=feature_layers)
        store = cache.open(new_store, slots, num_entries, feature_layers, runner.store_compat_key, fingerprint)
        drafter.bind(runner, store)
        needs = drafter.needs(runner)  # views are known after bind
        verifier.bind(runner, store, max_nodes)
        self._prefiller = Prefiller(self.cache_manager, runner, drafter, store, self._chunk_size)
        self._store, self._query_layers = store, needs.query_layers
        if runner.tp_rank is not None:
            runner.tp_rank.check_views(bool(needs.views or verifier.views or needs.query_layers))

    def capture_graphs(self, on_progress: Callable[[float], None] = lambda fraction: None) -> int:
        """Captures CUDA graphs of verification forwards. Returns their number; ``on_progress`` gets fractions of 1."""
        with self.runner.lock:
            if not self.cache_manager.is_open:
                self.cache_manager.open((), self._open_store)
            taps = Taps(queries=self._query_layers)
            return self.runner.capture_graphs(self._store, self.drafter.max_nodes + 1, taps, on_progress)
