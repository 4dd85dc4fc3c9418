"""Reading of prompts, in pieces that take turns with the rounds of others."""

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

# Prompt tokens read between two rounds, and at most in one forward: enough to keep the matrix units busy, few enough to
# bound memory and the time that the others wait. A GPU reads the prefix's keys once for more rows.
PREFILL_CHUNK, PREFILL_CHUNK_ON_GPU = 1024, 4096


def default_chunk_size(runner: TargetRunner) -> int:
    """The number of prompt tokens that a target reads at most in one forward."""
    # Buffers of windows and recurrent states have room for the smaller pieces.
    bounded = bool(runner.execution_model.layout.windows) or runner.has_recurrent_layers
    return PREFILL_CHUNK if runner.device.type == "cpu" or bounded else PREFILL_CHUNK_ON_GPU


class Prefiller:
    """Reads the prompts of sequences into their slots.

    Args:
        chunk: prompt tokens read between two rounds, and at most in one forward.
        reuses_outputs: rows of earlier outputs may be reused, which were not computed in whole pieces.
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
        self._cache, self._store, self._keeps_outputs = cache, store, reuses_outputs
        self._layers = drafter.query_layers(runner)
        # A user's hooks may look at a prompt's last row: they see it whole, as in the model's own generate.
        self._whole = bool(user_code_in(runner.model))
        self.chunk_size = runner.context_length if self._whole else chunk_size
        # Sequence index -> layer -> query vectors (heads, rows, head size) of prompts still in prefill.
        self._queries: dict[int, dict[int, list[torch.Tensor]]] = {}

    def discard(self, s: Sequence) -> bool:
        """Drops what is known of a sequence; True if its prompt was begun and is not read to the end."""
        return self._queries.pop(s.index, None) is not None

    def in_prefill(self, s: Sequence) -> bool:
        """True if a sequence's prompt is still to be read."""
        return not s.output or s.index in self._queries

    def prefill(self, reading: list[Sequence]) -> list[Step]:
        """Reads pieces of prompts, until they have :attr:`chunk_size` tokens together."""
        steps: list[Step] = []
        read = 0
        for s in reading:
            while self.in_prefill(s) and read < self.chunk_size:
                start = time.perf_counter()
                if s.index not in self._queries:
                    s.stats.cached_tokens = self._begin(s)
                before = self._store.lengths[s.slot]
                emitted = self._read_piece(s, before)
                now = self._store.lengths[s.slot]
                read += now - before
                steps.append(
                    Step(s.index, emitted, 0, 0, 0, "prefill", time.perf_counter() - start, now, s.finish_reason)
                )
        return steps

    def _begin(self, s: Sequence) -> int:
        """Puts what was kept of a prompt's beginning into its slot; returns its tokens."""
        piece = 1 if self._keeps_outputs else self.chunk_size
        if s.sampler.prompt_logits_reader is not None or not s.reuse or self._whole:
            piece = len(s.prompt)  # nothing that was kept: it has no logits, or is not wanted
        self._queries[s.index] = {layer: [] for layer in self._layers}
        return self._cache.reuse_prefix(s.slot, s.prompt, piece, self._runner.rope_regime(len(s.prompt)))

    def _read_piece(self, s: Sequence, start: int) -> tuple[int, ...]:
        """Reads a prompt from token ``start`` on; the logits of its last token give the first new one.

        Pieces end at multiples of :attr:`chunk_size`, whoever drafts and whoever else is there: rows that are read together
        get the same bits.

        Returns:
            The token that was emitted, if any.
        """
        store, window, length = self._store, self._drafter.num_prompt_queries, len(s.prompt)
        end = min(length, (start // self.chunk_size + 1) * self.chunk_size)
        taps = Taps(queries=self._layers) if end > length - window else NO_TAPS
        block = store.make_forward_batch([s.slot], [s.prompt[start:end]], is_prefill=True, prompt_len=length)
        reader = s.sampler.prompt_logits_reader
        logits: Literal["all", "last", "none"] = "all" if reader else "last" if end == length else "none"
        out = self._runner.forward(block, store, logits=logits, taps=taps, check_nan=False)
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
        (decided,) = sample_target_tokens([(root, out.logits[0], s.sampler)], self._runner.model)
        emitted = accept_path(root, out.logits[0], s.sampler, s.input_ids, s.emit, decided).token_ids
        pieces = self._queries.pop(s.index)
        queries = {layer: torch.cat(q, dim=1)[:, -window:] for layer, q in pieces.items()}
        self._cache.record_tokens(s.slot, s.prompt)
        self._drafter.observe(RoundResult(s, root, new_token_ids=emitted, mode="prefill", queries=queries))
        return emitted
