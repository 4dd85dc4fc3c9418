"""SpecExtend in vLLM: a small language model of ours, on the chunks of a text that the target attends to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.plugins.followed import Followed
from longdraft.plugins.vllm.queries import StepQueries
from longdraft.plugins.vllm.reading import Reading

_SIZES = ("chunk", "chunks", "every", "layer", "recent")


class SpecExtend(Reading):
    """Drafts chains with a small language model, whose KV is its own.

    The chunks that it sees are those that a layer of the target attends to (SpecExtend, section 2.2).

    Options: those of :class:`~longdraft.plugins.vllm.reading.Reading`, and ``chunk``, ``chunks``, ``every``, ``layer``,
    ``sink``, ``recent`` as method ``specextend`` has them.
    """

    drafter: SmallLMDrafter

    @staticmethod
    def defaults() -> dict[str, Any]:
        return Reading.defaults() | dict.fromkeys(_SIZES) | {"sink": 32}

    def load(self, folder: Path) -> tuple[SmallLMDraft, SmallLMDrafter]:
        draft = SmallLMDraft.load(folder)
        sizes = {name: self.options[name] for name in (*_SIZES, "sink")}
        return draft, SmallLMDrafter(draft, tree="chain", depth=self.tokens, view="retrieval", **sizes)

    def layer_of(self, layers: int) -> int:
        assert self.drafter.retrieval is not None
        (layer,) = self.drafter.retrieval.layers(layers)
        return layer

    def load_model(self, model: Any) -> None:
        super().load_model(model)
        self._queries = StepQueries(self.layer, self.target.device)

    def prepare(self, followed: list[Followed]) -> None:
        super().prepare(followed)
        for each in followed:
            found = self._queries.read(self.runner, each.row, each.known, self.drafter.query_window)
            each.queries = {} if found is None else {0: found}  # the copy has one layer
