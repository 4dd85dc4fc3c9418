"""Chunked prefill: reads prompts in chunks, between decoding rounds of other sequences."""

from __future__ import annotations

import time
from typing import Literal

import torch

from longdraft.engine.accept import accept_path, sample_target_tokens
from longdraft.engine.cache_manager import CacheManager
from longdraft.engine.drafter import Drafter
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.engine.stats import Step
from longdraft.memory.store import KVStore
from longdraft.model.called_functions import user_code_in
from longdraft.model.outputs import NO_TAPS, Taps
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import root_tree

# Most prompt tokens of one forward, and between two rounds: enough to keep the matrix units busy, few enough to bound
# memory and the waiting time of other sequences. Larger on a GPU, where each chunk reads all keys of the prefix again.
PREFILL_CHUNK, PREFILL_CHUNK_ON_GPU = 1024, 4096


def default_chunk_size(runner: TargetRunner) -> int:
    """Returns the default for the most prompt tokens of one forward."""
    # The buffers of sliding windows and recurrent layers have space only for small chunks.
    has_small_buffers = bool(runner.execution_model.layout.windows) or runner.has_recurrent_layers
    return PREFILL_CHUNK if runner.device.type == "cpu" or has_small_buffers else PREFILL_CHUNK_ON_GPU


class Prefiller:
    """Computes the KV of prompts in the slots of ``store``, the store of the cache manager's cache.

    ``chunk_size`` is the most prompt tokens in a forward, and between two rounds.
    """

    def __init__(
        self, cache_manager: CacheManager, runner: TargetRunner, drafter: Drafter, store: KVStore, chunk_size: int
    ) -> None:
        self._runner, self._drafter, self._store = runner, drafter, store
        self._cache, self._keeps_outputs = cache_manager.cache, cache_manager.keeps_outputs
        self._needs = drafter.needs(runner)
        # A user's hooks get the whole prompt in one forward, as in the model's own generate.
        self._in_one_chunk = bool(user_code_in(runner.model))
        self.chunk_size = runner.context_length if self._in_one_chunk else chunk_size
        # For prompts in prefill: sequence index -> layer -> queries (heads, tokens, head size) of each chunk.
        self._queries: dict[int, dict[int, list[torch.Tensor]]] = {}

    def release(self, s: Sequence) -> None:
        """Drops the queries of a prompt that was not read to the end."""
        self._queries.pop(s.index, None)

    def prefill(self, sequences: list[Sequence]) -> list[Step]:
        """Reads chunks of prompts, about :attr:`chunk_size` tokens in total, and returns a step for each chunk."""
        steps: list[Step] = []
        num_read = 0
        for s in sequences:
            while s.in_prefill and num_read < self.chunk_size:
                start_time = time.perf_counter()
                if not s.is_started:
                    s.stats.cached_tokens = self._begin(s)
                start_len = self._store.lengths[s.slot]
                new_token_ids = self._prefill_chunk(s, start_len)
                end_len = self._store.lengths[s.slot]
                num_read += end_len - start_len
                seconds = time.perf_counter() - start_time
                # A prefill drafts nothing, so from_draft, drafted and accepted are 0.
                steps.append(Step(s.index, new_token_ids, 0, 0, 0, "prefill", seconds, end_len, s.finish_reason))
        return steps

    def _begin(self, s: Sequence) -> int:
        """Begins a prefill: fills the slot with the cached prefix of the prompt, and returns the prefix's length."""
        alignment = 1 if self._keeps_outputs else self.chunk_size  # outputs end anywhere, prompts at chunks
        if s.sampler.prompt_logits_reader is not None or not s.reuse or self._in_one_chunk:
            alignment = len(s.prompt)  # reuses nothing: the last token never counts, and shorter prefixes do not align
        self._queries[s.index] = {layer: [] for layer in self._needs.query_layers}
        s.is_started = True
        return self._cache.reuse_prefix(s.slot, s.prompt, alignment, self._runner.rope_regime(len(s.prompt)))

    def _prefill_chunk(self, s: Sequence, start: int) -> tuple[int, ...]:
        """Reads the chunk of a prompt that begins at token ``start``. Returns the first output token after the last
        chunk, else no token.

        Chunks end at multiples of :attr:`chunk_size` with any drafter and batch, so equal prompts get equal bits.
        """
        store, num_queries, prompt_len = self._store, self._needs.num_prompt_queries, len(s.prompt)
        end = min(prompt_len, (start // self.chunk_size + 1) * self.chunk_size)
        taps = Taps(queries=self._needs.query_layers) if end > prompt_len - num_queries else NO_TAPS
        batch = store.make_forward_batch([s.slot], [s.prompt[start:end]], is_prefill=True, prompt_len=prompt_len)
        logits_reader = s.sampler.prompt_logits_reader
        logits: Literal["all", "last", "none"] = "all" if logits_reader else "last" if end == prompt_len else "none"
        out = self._runner.forward(batch, store, logits=logits, taps=taps, check_nan=False)
        store.commit(s.slot, range(end - start))
        if logits_reader is not None and out.logits is not None:
            logits_reader.prompt_logits(start, out.logits[0])
            out.logits = out.logits[:, -1:]
        for layer, q in out.queries.items():
            self._queries[s.index][layer].append(q[0])
        if end < prompt_len:
            return ()
        assert out.logits is not None
        root = root_tree(s.prompt[-1])
        (target_tokens,) = sample_target_tokens([(root, out.logits[0], s.sampler)], self._runner.model)
        new_token_ids = accept_path(root, out.logits[0], s.sampler, s.input_ids, s.emit, target_tokens).token_ids
        chunk_queries = self._queries.pop(s.index)
        queries = {layer: torch.cat(q, dim=1)[:, -num_queries:] for layer, q in chunk_queries.items()}
        self._cache.record_tokens(s.slot, s.prompt)
        self._drafter.observe(RoundResult(s, root, new_token_ids=new_token_ids, mode="prefill", queries=queries))
        return new_token_ids
