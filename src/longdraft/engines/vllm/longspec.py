"""LongSpec in vLLM: the block's window is ours, its cross-attention reads the last layer of vLLM's own KV cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from longdraft.drafters.longspec import LongSpecDrafter
from longdraft.drafters.longspec_draft import LongSpecDraft
from longdraft.engines.followed import Followed
from longdraft.engines.target import EngineTarget, LastLayer
from longdraft.engines.vllm.pages import Pages
from longdraft.engines.vllm.proposer import Proposer
from longdraft.errors import CapabilityError, RequestError


class LongSpec(Proposer):
    """Drafts chains with a trained LongSpec block.

    Options: ``draft``, the folder of the draft; ``slots``, requests that are drafted for at a time (their last layer is
    copied; others are decoded without drafts).
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"draft": None, "slots": 8}

    @property
    def slots(self) -> int:
        return min(int(self.options["slots"]), super().slots)

    def load_model(self, model: Any) -> None:
        """Raises CheckpointError where the draft was made for another target, RequestError without a draft."""
        folder = self.options["draft"]
        if folder is None:
            raise RequestError('LongSpec needs a draft: additional_config={"longdraft": {"draft": "FOLDER"}}.')
        parallel, own = self.config.parallel_config, self.config.model_config
        if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            raise CapabilityError("LongSpec drafts for a model on one device: use longdraft.engines.vllm.Lookup.")
        draft = LongSpecDraft.load(Path(folder))
        sizes = int(own.get_head_size()), int(own.get_total_num_kv_heads())
        target = EngineTarget(own.hf_text_config, model, *sizes, draft.made_for.get("weights"))
        self.drafter = drafter = LongSpecDrafter(draft, tree="chain", depth=self.tokens)
        self._layer = LastLayer(target, drafter, self.slots, self.longest)
        self._pages: Pages | None = None
        self._last = target.last

    def prepare(self, followed: list[Followed]) -> None:
        if self._pages is None:
            self._pages = Pages(self.config, self._last)
        for each in followed:
            self._layer.copy(each, partial(self._pages.read, self.runner, each.row))
