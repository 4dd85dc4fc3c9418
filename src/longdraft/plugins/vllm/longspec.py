"""LongSpec in vLLM: the block's window is ours, its cross-attention reads the last layer of vLLM's own KV cache."""

from __future__ import annotations

from pathlib import Path

from longdraft.drafters.longspec import LongSpecDraft, LongSpecDrafter
from longdraft.plugins.vllm.reading import Reading


class LongSpec(Reading):
    """Drafts chains with a trained LongSpec block. Options: see :class:`~longdraft.plugins.vllm.reading.Reading`."""

    def load(self, folder: Path) -> tuple[LongSpecDraft, LongSpecDrafter]:
        draft = LongSpecDraft.load(folder)
        return draft, LongSpecDrafter(draft, tree="chain", depth=self.tokens)
