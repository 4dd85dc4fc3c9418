"""The decoding loop. Every method is this loop with other parts in it.

propose -> verify (one target forward) -> accept -> commit -> observe -> emit
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from longdraft.drafters.base import Drafter
from longdraft.errors import ContextError, PromptError
from longdraft.kv.prompt_cache import PromptCache
from longdraft.kv.store import KVStore
from longdraft.sequence import FinishReason, Sequence, Step, StopRule
from longdraft.target.runner import TargetRunner
from longdraft.trees.tree import TokenTree, padded_mask
from longdraft.verify.acceptance import accept
from longdraft.verify.sampling import Picker

# Prompt tokens a prefill forward reads: long enough to keep the matrix units busy, short enough to bound memory.
PREFILL_CHUNK = 1024


@dataclass
class Engine:
    """Decodes a batch of sequences.

    Attributes:
        runner: the target.
        drafter: proposes trees.
        sequences: the batch; sequence i uses slot i.
        pickers: one a sequence: how its tokens are picked from the target's logits.
        rules: asked in order after each emitted token whether the sequence is finished.
        cache: where the KV lives, and what of it is already there.
        cancelled: asked between forwards; True ends all sequences with "cancelled".
        chunk: prompt tokens a prefill forward.
    """

    runner: TargetRunner
    drafter: Drafter
    sequences: list[Sequence]
    pickers: list[Picker]
    rules: list[StopRule] = field(default_factory=list)
    cache: PromptCache = field(default_factory=PromptCache)
    cancelled: Callable[[], bool] = lambda: False
    chunk: int = PREFILL_CHUNK

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
        capacity = max(len(s.prompt) + s.max_new_tokens for s in self.sequences) + self.drafter.max_nodes
        layers = self.drafter.feature_layers(self.runner)
        new_store = partial(self.runner.new_store, feature_layers=layers)
        return self.cache.open(new_store, [s.prompt for s in self.sequences], capacity, layers)

    def steps(self, store: KVStore) -> Iterator[Step]:
        """Runs to the end, a step for each sequence and round. Closing the generator leaves the cache usable."""
        self.drafter.bind(self.runner, store)
        try:
            for s in self.sequences:
                yield from self._prefill(s, store)
            while active := [s for s in self.sequences if s.finish_reason is None]:
                if self.cancelled():
                    yield from (self._cancel(s) for s in active)
                    return
                yield from self._round(active, store)
        finally:
            for s in self.sequences:
                self.cache.remember(s.slot, s.tokens)
                self.drafter.release(s)

    def _prefill(self, s: Sequence, store: KVStore) -> Iterator[Step]:
        """Reads the prompt in chunks; its last logits give the first token."""
        while (done := store.lengths[s.slot]) < len(s.prompt):
            if self.cancelled():
                yield self._cancel(s)
                return
            start = time.perf_counter()
            tokens = s.prompt[done : done + self.chunk]
            last = done + len(tokens) == len(s.prompt)
            out = self.runner.forward([tokens], store, [s.slot], logits="last" if last else "none")
            store.commit(s.slot, range(len(tokens)))
            emitted: tuple[int, ...] = ()
            if last:
                assert out.logits is not None
                root = TokenTree((tokens[-1],), (-1,))
                emitted = accept(root, out.logits[0], self.pickers[s.index], s.ids, self._emitter(s)).tokens
                self.drafter.prefill(s)
            read = done + len(tokens)
            seconds = time.perf_counter() - start
            yield Step(s.index, emitted, 0, 0, 0, "prefill", seconds, read, s.finish_reason)

    def _round(self, active: list[Sequence], store: KVStore) -> list[Step]:
        """One verification of every active sequence."""
        start = time.perf_counter()
        # A path of depth k emits k + 1 tokens: deeper nodes than the budget allows are not worth verifying.
        trees = [tree.limited(s.remaining - 1) for s, tree in zip(active, self.drafter.propose(active), strict=True)]
        size = max(tree.size for tree in trees)
        chains = all(tree.is_chain for tree in trees)
        out = self.runner.forward(
            [tree.tokens + tree.tokens[:1] * (size - tree.size) for tree in trees],
            store,
            [s.slot for s in active],
            # A padded row comes after all real ones, so under a chain's causal mask nobody sees it.
            depths=None if chains else [tree.depths + (0,) * (size - tree.size) for tree in trees],
            mask=None if chains else padded_mask(trees, size),
        )
        assert out.logits is not None
        outcomes = []
        for s, tree, logits in zip(active, trees, out.logits, strict=True):
            accepted = accept(tree, logits, self.pickers[s.index], s.ids, self._emitter(s))
            store.commit(s.slot, accepted.path)
            s.rounds += 1
            s.drafted += tree.drafted
            s.accepted += accepted.from_draft
            self.drafter.observe(s, tree, accepted.from_draft)
            outcomes.append((s, tree, accepted))
        seconds = time.perf_counter() - start
        steps: list[Step] = []
        for s, tree, a in outcomes:
            steps.append(
                Step(
                    sequence=s.index,
                    token_ids=a.tokens,
                    from_draft=a.from_draft,
                    drafted=tree.drafted,
                    accepted=a.from_draft,
                    mode="full",
                    seconds=0.0 if steps else seconds,
                    prefilled=len(s.prompt),
                    finish_reason=s.finish_reason,
                )
            )
        return steps

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


def eos_rule(eos: frozenset[int]) -> StopRule:
    """Finishes at any of several end-of-sequence tokens."""

    def rule(s: Sequence) -> FinishReason | None:
        return "eos" if s.output[-1] in eos else None

    return rule


def stop_string_rule(stops: tuple[str, ...], decode: Callable[[list[int]], str]) -> StopRule:
    """Finishes when a stop string stands in the output's text, wherever token borders fall.

    Args:
        decode: token ids to text, special tokens included or not as the user sees them.
    """
    # A stop string of k bytes spans at most k tokens, and k UTF-8 characters are at most 4k bytes.
    window = 4 * max(map(len, stops)) + 8

    def rule(s: Sequence) -> FinishReason | None:
        tail = decode(s.output[-window:])
        return "stop" if any(stop in tail for stop in stops) else None

    return rule
