"""What proposers share whose draft reads one layer of the target in vLLM's own KV cache."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

from longdraft.drafts.draft import Draft
from longdraft.engine.drafter import Drafter
from longdraft.errors import CapabilityError, RequestError
from longdraft.plugins.followed import Followed
from longdraft.plugins.target import CopiedLayer, EngineTarget
from longdraft.plugins.vllm.layer import Layer
from longdraft.plugins.vllm.pages import Pages
from longdraft.plugins.vllm.proposer import Proposer


class Reading(Proposer):
    """Its layer's rows are copied as they come, for some requests at a time.

    Options of all of them: ``draft``, the folder of the draft; ``slots``, requests that are drafted for at a time
    (others are decoded without drafts).
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"draft": None, "slots": 8}

    @property
    def slots(self) -> int:
        return min(int(self.options["slots"]), super().slots)

    @abstractmethod
    def load(self, folder: Path) -> tuple[Draft[Any], Drafter]:
        """The draft in a folder, and what drafts with it."""

    def layer_of(self, layers: int) -> int:
        """The one that is read, of so many."""
        return layers - 1

    def load_model(self, model: Any) -> None:
        """Raises CheckpointError where the draft was made for another target, RequestError without a draft."""
        folder = self.options["draft"]
        if folder is None:
            raise RequestError(
                f'{type(self).__name__} needs a draft: additional_config={{"longdraft": {{"draft": "FOLDER"}}}}.'
            )
        parallel, own = self.config.parallel_config, self.config.model_config
        if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            raise CapabilityError(
                f"{type(self).__name__} drafts for a model on one device: use longdraft.plugins.vllm.Lookup."
            )
        draft, self.drafter = self.load(Path(folder))
        sizes = int(own.get_head_size()), int(own.get_total_num_kv_heads())
        self.target = target = EngineTarget(own.hf_text_config, model, *sizes, draft.made_for.get("weights"))
        self.layer = Layer(self.config, self.layer_of(target.last + 1))
        self._pages = Pages(self.layer)
        self._copied = CopiedLayer(target, self.drafter, self.slots, self.longest)

    def prepare(self, followed: list[Followed]) -> None:
        for each in followed:
            self._copied.copy(each, partial(self._pages.read, self.runner, each.row))
