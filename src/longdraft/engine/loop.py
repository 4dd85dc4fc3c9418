"""The decoding loop. Every method is this loop with other parts in it: see :meth:`Engine._round`.

Requests come and go between rounds. A request waits until a slot is free, its prompt is read in pieces that take turns
with the rounds of the others, and it leaves when it has ended: its slot is the next one's.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from longdraft.engine.accept import accept, decide
from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.planner import Plan, Planner
from longdraft.engine.schedule import Schedule
from longdraft.engine.sequence import Sequence
from longdraft.engine.stats import Stats, Step, step_of
from longdraft.errors import CapabilityError, ContextError, MemoryBudgetError, PromptError
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.runner import NO_TAPS, Taps, TargetRunner
from longdraft.trees.tree import TokenTree

logger = logging.getLogger("longdraft")

# Prompt tokens that are read between two rounds, and at most in one forward: long enough to keep the matrix units busy,
# short enough to bound memory, and the time that the others wait.
PREFILL_CHUNK = 1024


class Engine:
    """Decodes sequences, as many at a time as there are slots.

    Args:
        runner: the target.
        drafter: proposes trees.
        schedule: verifies them.
        cache: where the KV lives, and what of it is already there; None: a cache of its own.
        planner: says how much to draft and to verify; None: the trees are the drafter's own.
        slots: sequences at a time; fewer where the memory does not hold the KV of so many.
        capacity: tokens of the longest text, prompt and output; at least those of the texts that wait at first.
            A longer one waits until nobody decodes, and then has more memory taken.
        chunk: prompt tokens that are read between two rounds, and at most in one forward.

    Attributes:
        stats: what has been counted of each sequence, by index.
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
        chunk: int = PREFILL_CHUNK,
    ) -> None:
        self.runner, self.drafter, self.schedule = runner, drafter, schedule or Schedule()
        self._kept = cache is not None
        self.cache = PromptCache() if cache is None else cache
        self.planner, self.slots, self.chunk = planner, slots, chunk
        self.stats: dict[int, Stats] = {}
        self._capacity = capacity
        self._waiting: deque[Sequence] = deque()
        # Those that have a slot, in the order in which they came, and the slots that nobody has.
        self._active: list[Sequence] = []
        self._free: list[int] = []
        self._ended: list[Step] = []
        # Queries of the prompts that are being read, layer by layer.
        self._looked: dict[int, dict[int, list[torch.Tensor]]] = {}
        self._plan: Plan | None = None
        self._drafted = 0.0  # when the last round had drafted
        self._opened = -1
        self._read_last = False
        if planner is not None:
            self.drafter.use_planner()
            self.schedule.use_planner()
            planner.expect(self.drafter)

    # --- requests ---

    def add(self, sequence: Sequence) -> None:
        """A sequence joins as soon as a slot is free. Its index is one that no other of the engine's has.

        Raises:
            PromptError: an empty prompt.
            ContextError: prompt and budget exceed the target's context.
        """
        limit, s = self.runner.context_length, sequence
        if not s.prompt:
            raise PromptError("The prompt is empty. Give at least one token.")
        if len(s.prompt) + s.max_new_tokens > limit:
            raise ContextError(
                f"The prompt has {len(s.prompt)} tokens; with {s.max_new_tokens} new ones that is "
                f"{len(s.prompt) + s.max_new_tokens}, and the model's context holds {limit}. Shorten the prompt, "
                f"ask for fewer new tokens, or load the model with a rope_factor (YaRN), which stretches its context."
            )
        if s.index in self.stats:
            raise ValueError(f"there is a sequence {s.index} already")
        self.stats[s.index] = Stats()
        self._waiting.append(s)

    def abort(self, index: int) -> None:
        """Ends a sequence where it is; the next step says so. One that has ended already is left as it is."""
        with self.runner.lock:
            for s in [*self._active, *self._waiting]:
                if s.index == index:
                    s.finish_reason = "cancelled"
                    self._ended.append(Step(s.index, (), 0, 0, 0, "full", 0.0, len(s.prompt), s.finish_reason))
                    self._leave(s)

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do, or to tell."""
        return bool(self._waiting or self._active or self._ended)

    def holds(self, index: int) -> bool:
        """Whether a step of a sequence is still to come."""
        known = [*(s.index for s in (*self._active, *self._waiting)), *(step.sequence for step in self._ended)]
        return index in known

    def run(self) -> Iterator[Step]:
        """Steps until all have ended."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Step]:
        """Reads prompts for a while, or makes a round of all that decode: the two take turns.

        Returns:
            What came of it, a step for each sequence concerned.

        Raises:
            MemoryBudgetError: there is no room for a sequence, before any work on it.
            CapabilityError: another run has taken the cache.
            NumericalError: the target's logits are NaN.
        """
        with self.runner.lock:
            try:
                self._check_cache()
                self._admit()
                told, self._ended = self._ended, []
                reading = [s for s in self._active if not s.output]
                decoding = [s for s in self._active if s.output]
                self._read_last = bool(reading) and not (decoding and self._read_last)
                if self._read_last:
                    told += self._read(reading)
                elif decoding:
                    told += self._decode(decoding)
                for s in [s for s in self._active if s.finish_reason is not None]:
                    self._leave(s)
                return told
            except BaseException:
                self._close()
                raise

    def close(self) -> None:
        """Ends all sequences where they are. The cache stays usable."""
        with self.runner.lock:
            self._close()

    def _close(self) -> None:
        self._waiting.clear()
        self._ended.clear()
        for s in list(self._active):
            self._leave(s)

    # --- coming and going ---

    def _admit(self) -> None:
        """Gives free slots to those that wait."""
        while self._waiting:
            s = self._waiting[0]
            if not self._active and (self._opened < 0 or self._rows(s) > self._capacity):
                self._open()
            if not self._free or self._rows(s) > self._capacity:
                return
            s.slot = self.cache.choose(self._free, s.prompt[:-1])
            self._free.remove(s.slot)
            self._active.append(self._waiting.popleft())

    def _leave(self, s: Sequence) -> None:
        if s in self._waiting:
            self._waiting.remove(s)
            return
        self._active.remove(s)
        begun = self._looked.pop(s.index, None) is not None or bool(s.output)
        self._free.append(s.slot)
        # Of one that was not begun the slot holds what it held before; of a lost cache, the rows are another run's now.
        if begun and self.cache.opened == self._opened:
            self.schedule.close(s)
            # Of a cache of its own it reuses rows of prompts: an output's were not computed in whole pieces.
            self.cache.remember(s.slot, s.tokens if self._kept else s.prompt)
        self.drafter.release(s)

    @staticmethod
    def _rows(s: Sequence) -> int:
        return len(s.prompt) + s.max_new_tokens

    def _open(self) -> None:
        """Takes memory for those that wait, and binds the parts to it.

        Raises:
            MemoryBudgetError: it does not hold a single one.
        """
        runner, nodes = self.runner, self.drafter.max_nodes
        runner.refresh()
        # A store that was too small is made larger by half, or every longer text would need another.
        larger = min(3 * self._capacity // 2, runner.context_length) if self._opened >= 0 else self._capacity
        capacity = max(larger, *map(self._rows, self._waiting))
        layers = self.drafter.feature_layers(runner) or self.cache.feature_layers
        new_store = partial(runner.new_store, feature_layers=layers)
        rows, slots = capacity + nodes + self.schedule.extra_rows(nodes), self.slots
        while True:
            try:
                store = self.cache.open(new_store, slots, rows, layers, runner.kv_dtype)
                self._store, self._queries = store, self.drafter.query_layers(runner)
                self.drafter.bind(runner, store)
                self.schedule.open(runner, store, nodes, self._queries)
                if runner.share is not None:
                    runner.share.check_looks(bool(self.drafter.views or self.schedule.views or self._queries))
                break
            except MemoryBudgetError:
                if slots == 1 or self._kept:
                    raise
                logger.warning("There is no memory for %d sequences at a time: %d are decoded.", slots, slots // 2)
                slots, self.cache = slots // 2, PromptCache()
        self._capacity, self._opened = capacity, self.cache.opened
        self._free = list(range(slots))
        if self.planner is not None:
            self._plan = self.planner.start()

    def _check_cache(self) -> None:
        if self._opened < 0 or self.cache.opened == self._opened:
            return
        self._opened = -1
        if self._active:
            raise CapabilityError(
                "Another run has taken this run's PromptCache before it had ended. Give runs that take turns a cache "
                "each, or finish or close one before the next begins."
            )

    # --- decoding ---

    def _decode(self, batch: list[Sequence]) -> list[Step]:
        """A round of a batch. Whatever is counted, timed or learned of it follows its events."""
        start, forwards = time.perf_counter(), self.drafter.forwards
        events = self._round(batch)
        seconds = time.perf_counter() - start
        if self._plan is not None:
            drafting = self._drafted - start
            self._plan.observe(events, self.drafter.forwards - forwards, drafting, seconds - drafting)
            self.schedule.observe_round(events, seconds, self._plan.plain(batch))
        for s, event in zip(batch, events, strict=True):
            self.stats[s.index].count(event)
        # The first of a round's steps carries its seconds.
        return [replace(step, seconds=0.0 if i else seconds) for i, step in enumerate(map(step_of, batch, events))]

    def _round(self, batch: list[Sequence]) -> list[Event]:
        """One verification of every sequence of a batch."""
        trees = self._propose([self.schedule.drafter_sequence(s) for s in batch])
        trees = self._prune(trees)
        events = []
        found = self.schedule.verify(batch, trees)
        decided = decide([(v.tree, v.logits, v.walker.sampler) for v in found])
        for verified, tokens in zip(found, decided, strict=True):
            walker = verified.walker
            accepted = accept(verified.tree, verified.logits, walker.sampler, walker.ids, walker.emit, tokens)
            event = self.schedule.commit(verified, accepted)
            self.drafter.observe(event)
            events.append(event)
        return events

    def _propose(self, batch: list[Sequence]) -> list[TokenTree]:
        """A tree for each sequence. Only the root for one that is about to end, or where drafting would not pay."""
        limit = None if self._plan is None else self._plan.node_limit(batch, [self.schedule.length(s) for s in batch])
        roots = {s.index: TokenTree((s.output[-1],), (-1,)) for s in batch}
        going = [s for s in batch if s.finish_reason is None]
        if limit is not None and not self.drafter.free:
            going = limit.choose(going, [roots[s.index] for s in going])
        proposed = self.drafter.propose(going, limit) if going else []
        # A path of depth k emits k + 1 tokens: deeper nodes than may be emitted are not worth verifying.
        trees = {s.index: tree.limited(s.remaining - 1) for s, tree in zip(going, proposed, strict=True)}
        return [trees.get(s.index, roots[s.index]) for s in batch]

    def _prune(self, trees: list[TokenTree]) -> list[TokenTree]:
        """What is worth verifying of each tree; without a planner, all of it."""
        pruned = trees if self._plan is None else self._plan.prune(trees)
        self._drafted = time.perf_counter()
        return pruned

    # --- prompts ---

    def _read(self, reading: list[Sequence]) -> list[Step]:
        """Reads pieces of prompts, as long as they have no more than :attr:`chunk` tokens together."""
        steps: list[Step] = []
        read = 0
        for s in reading:
            while not s.output and read < self.chunk:
                start = time.perf_counter()
                if s.index not in self._looked:
                    kept = self.cache.begin(s.slot, s.prompt, 1 if self._kept else self.chunk)
                    self.stats[s.index].cached = kept
                    self._looked[s.index] = {layer: [] for layer in self._queries}
                done = self._store.lengths[s.slot]
                emitted = self._read_piece(s, done)
                read += (now := self._store.lengths[s.slot]) - done
                seconds = time.perf_counter() - start
                steps.append(Step(s.index, emitted, 0, 0, 0, "prefill", seconds, now, s.finish_reason))
        return steps

    def _read_piece(self, s: Sequence, done: int) -> tuple[int, ...]:
        """Reads a prompt from token ``done`` on; its last logits give the first token.

        Pieces end at multiples of :attr:`chunk`, whoever drafts and whoever else is there: rows that are read together
        get the same bits.
        """
        store, window = self._store, self.drafter.query_window
        read = min(len(s.prompt), (done // self.chunk + 1) * self.chunk)
        last = read == len(s.prompt)
        # Of the prompt's last tokens, as many as the drafter's query window.
        taps = Taps(queries=self._queries) if read > len(s.prompt) - window else NO_TAPS
        block = store.block([s.slot], [s.prompt[done:read]], prompt=True)
        out = self.runner.forward(block, store, logits="last" if last else "none", taps=taps, check=False)
        store.commit(s.slot, range(read - done))
        for layer, q in out.queries.items():
            self._looked[s.index][layer].append(q[0])
        if not last:
            return ()
        assert out.logits is not None
        root = TokenTree((s.prompt[-1],), (-1,))
        (decided,) = decide([(root, out.logits[0], s.sampler)])
        emitted = accept(root, out.logits[0], s.sampler, s.ids, s.emit, decided).tokens
        looked = self._looked.pop(s.index)
        queries = {layer: torch.cat(q, dim=1)[:, -window:] for layer, q in looked.items()}
        self.cache.remember(s.slot, s.prompt)
        self.drafter.observe(
            Event(self.schedule.drafter_sequence(s), root, emitted=emitted, mode="prefill", queries=queries)
        )
        return emitted
