"""SGLang's NGRAM worker with our trees. Imports SGLang, so only the plugin's factory imports this."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.runtime_context import get_device, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from longdraft_engines.sglang.drafting import Drafting
from longdraft_engines.sglang.trees import tree_arrays

# Environment variable: how many requests are drafted for at a time. Each takes memory for one layer of a context.
SLOTS = "LONGDRAFT_SGLANG_SLOTS"


class LongSpecWorker(NGRAMWorker):
    """Written for sglang 0.5.23 (see the package's docstring for what is tested)."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        del gpu_id, nccl_port
        BaseSpecWorker.__init__(self)  # NGRAM's __init__ would build its corpus
        spec, schedule = get_spec(), get_schedule()
        self.server_args = server_args
        self.enable_overlap = not schedule.disable_overlap_schedule
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.page_size = schedule.page_size
        self.draft_token_num = self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self.topk, self.speculative_num_steps = spec.speculative_eagle_topk, spec.speculative_num_steps
        self.device = get_device().device
        self.adaptive_controller = None
        self.grammar_tree_host = None
        self._prev_decode_rids: set[str] = set()
        self.ngram_corpus = SimpleNamespace(erase_match_state=lambda names: None)

    def alloc_memory_pool(self, **settings: Any) -> None:
        """Makes the drafter once the target's pools exist."""
        super().alloc_memory_pool(**settings)
        slots = min(self.max_batch_size, int(os.environ.get(SLOTS, 8)))
        draft = self.server_args.speculative_draft_model_path
        self.drafting = Drafting(self.model_runner, draft, self.draft_token_num, slots)

    def clear_cache_pool(self) -> None:
        self._prev_decode_rids = set()
        self.drafting.forget()

    def _prepare_draft_tokens(self, batch: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        late: list[list[int]] = [[] for _ in batch.reqs]
        if self.enable_overlap and not batch.grammar_needs_sync():  # output_ids are a step behind
            counts = batch.spec_info.accept_lens.tolist()
            tokens = batch.spec_info.accept_tokens.view(len(counts), self.draft_token_num).tolist()
            late = [row[:count] for row, count in zip(tokens, counts, strict=True)]
        return tree_arrays(self.drafting.trees(batch.reqs, batch.req_pool_indices, late), self.draft_token_num)

    def _update_ngram_corpus(self, batch: Any) -> None:
        """LONGSPEC has no corpus."""
