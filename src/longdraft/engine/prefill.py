"""Chunked prefill: prompts are read in chunks, between decoding rounds of other sequences."""

from __future__ import annotations

import time
from typing import Literal

import torch

from longdraft.engine.accept import accept_path, sample_target_tokens
from longdraft.engine.drafter import Drafter
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.engine.stats import Step
from longdraft.memory.prompt_cache import PromptCache
from longdraft.memory.store import KVStore
from longdraft.model.fingerprints import user_code_in
from longdraft.model.outputs import NO_TAPS, Taps
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import TokenTree

# Prompt tokens of one forward, and between two rounds: enough to keep the matrix units busy, few enough to bound memory
# and the wait of other sequences. On a GPU larger chunks share each read of the prefix's keys.
PREFILL_CHUNK, PREFILL_CHUNK_ON_GPU = 1024, 4096


def default_chunk_size(runner: TargetRunner) -> int:
    """Returns the most prompt tokens of one forward of a target."""
    # The buffers of sliding windows and recurrent layers have room for small chunks only.
    is_bounded = bool(runner.execution_model.layout.windows) or runner.has_recurrent_layers
    return PREFILL_CHUNK if runner.device.type == "cpu" or is_bounded else PREFILL_CHUNK_ON_GPU


class Prefiller:
    """Reads the prompts of sequences into their slots.

    Args:
        chunk_size: most prompt tokens between two rounds, and in one forward.
        reuses_outputs: also reuse cached prefixes that do not end at a chunk boundary, such as earlier outputs.
    """

    def __init__(
        self,
        runner: TargetRunner,
        drafter: Drafter,
        cache: PromptCache,
        store: KVStore,
        chunk_size: int,
        reuses_outputs: bool,
    ) -> None:
        self._runner, self._drafter = runner, drafter
        self._cache, self._store, self._reuses_outputs = cache, store, reuses_outputs
        self._layers = drafter.query_layers(runner)
        # A user's hooks see the prompt in one forward, as in the model's own generate.
        self._in_one_chunk = bool(user_code_in(runner.model))
        self.chunk_size = runner.context_length if self._in_one_chunk else chunk_size
        # Sequence index -> layer -> queries (heads, tokens, head size) of prompts in prefill.
        self._queries: dict[int, dict[int, list[torch.Tensor]]] = {}

    def discard(self, s: Sequence) -> bool:
        """Drops a sequence's state. Returns True if its prefill has begun and is not complete."""
        return self._queries.pop(s.index, None) is not None

    def in_prefill(self, s: Sequence) -> bool:
        """True if a sequence's prompt is not read to the end."""
        return not s.output or s.index in self._queries

    def prefill(self, sequences: list[Sequence]) -> list[Step]:
        """Reads chunks of prompts, up to :attr:`chunk_size` tokens in total."""
        steps: list[Step] = []
        num_read = 0
        for s in sequences:
            while self.in_prefill(s) and num_read < self.chunk_size:
                start = time.perf_counter()
                if s.index not in self._queries:
                    s.stats.cached_tokens = self._begin(s)
                start_len = self._store.lengths[s.slot]
                new_token_ids = self._prefill_chunk(s, start_len)
                end_len = self._store.lengths[s.slot]
                num_read += end_len - start_len
                seconds = time.perf_counter() - start
                steps.append(Step(s.index, new_token_ids, 0, 0, 0, "prefill", seconds, end_len, s.finish_reason))
        return steps

    def _begin(self, s: Sequence) -> int:
        """Fills the slot with the cached prefix of the prompt; returns its length."""
        alignment = 1 if self._reuses_outputs else self.chunk_size
        if s.sampler.prompt_logits_reader is not None or not s.reuse or self._in_one_chunk:
            alignment = len(s.prompt)  # reuses nothing: a cached prefix has no logits, or is not wanted
        self._queries[s.index] = {layer: [] for layer in self._layers}
        return self._cache.reuse_prefix(s.slot, s.prompt, alignment, self._runner.rope_regime(len(s.prompt)))

    def _prefill_chunk(self, s: Sequence, start: int) -> tuple[int, ...]:
        """Reads the chunk of a prompt that begins at token ``start``. The last chunk emits the first new token.

        Chunks end at multiples of :attr:`chunk_size`, for any drafter and batch, so equal prompts get equal bits.

        Returns:
            The emitted token, if any.
        """
        store, num_queries, length = self._store, self._drafter.num_prompt_queries, len(s.prompt)
        end = min(length, (start // self.chunk_size + 1) * self.chunk_size)
        taps = Taps(queries=self._layers) if end > length - num_queries else NO_TAPS
        batch = store.make_forward_batch([s.slot], [s.prompt[start:end]], is_prefill=True, prompt_len=length)
        reader = s.sampler.prompt_logits_reader
        logits: Literal["all", "last", "none"] = "all" if reader else "last" if end == length else "none"
        out = self._runner.forward(batch, store, logits=logits, taps=taps, check_nan=False)
        store.commit(s.slot, range(end - start))
        if reader is not None and out.logits is not None:
            reader.prompt_logits(start, out.logits[0])
            out.logits = out.logits[:, -1:]
        for layer, q in out.queries.items():
            self._queries[s.index][layer].append(q[0])
        if end < length:
            return ()
        assert out.logits is not None
        root = TokenTree((s.prompt[-1],), (-1,))
        (target_tokens,) = sample_target_tokens([(root, out.logits[0], s.sampler)], self._runner.model)
        new_token_ids = accept_path(root, out.logits[0], s.sampler, s.input_ids, s.emit, target_tokens).token_ids
        chunks = self._queries.pop(s.index)
        queries = {layer: torch.cat(q, dim=1)[:, -num_queries:] for layer, q in chunks.items()}
        self._cache.record_tokens(s.slot, s.prompt)
        self._drafter.observe(RoundResult(s, root, new_token_ids=new_token_ids, mode="prefill", queries=queries))
        return new_token_ids
