"""A proposer of vLLM's ``custom_class``: follows the engine's requests, and has one of our drafters draft for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import numpy as np

from longdraft.errors import CapabilityError, RequestError
from longdraft.plugins.followed import Requests


class Proposer(Requests, ABC):
    """Requests are known by vLLM's ids.

    Args:
        config: vLLM's ``VllmConfig``.

    Attributes:
        drafter: of ours; made by :meth:`load_model`.
        runner: vLLM's model runner; :mod:`~longdraft.plugins.vllm.plugin` sets it.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.tokens: int = config.speculative_config.num_speculative_tokens
        given = (getattr(config, "additional_config", None) or {}).get("longdraft") or {}
        self.options = self.defaults() | dict(given)
        if unknown := set(self.options) - set(self.defaults()):
            raise RequestError(
                f"additional_config['longdraft'] has no {sorted(unknown)[0]!r} for {type(self).__name__}: it takes "
                f"{', '.join(sorted(self.defaults())) or 'nothing'}."
            )
        self.runner: Any = None
        super().__init__(self.slots, config.model_config.max_model_len)

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Options and what they are where nobody says."""
        return {}

    @property
    def slots(self) -> int:
        """Requests that are drafted for at a time; others are decoded without drafts."""
        return int(self.config.scheduler_config.max_num_seqs)

    @abstractmethod
    def load_model(self, model: Any) -> None:
        """Makes the drafter; vLLM hands over the target, ready to compute."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray[Any, Any],
        token_ids_cpu: np.ndarray[Any, Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafted tokens of each row of the engine's batch, in its order.

        Args:
            sampled_token_ids: of each row, the tokens that came with this step; none while its prompt is read.
            num_tokens_no_spec, token_ids_cpu: (rows,) and (rows, longest): its text, these tokens included.
        """
        del slot_mappings
        if self.runner is None:
            raise CapabilityError(
                "vLLM has not run longdraft's plugin: install longdraft in vLLM's environment, and name longdraft in "
                "VLLM_PLUGINS where that is set."
            )
        batch = self.runner.input_batch
        names: list[str] = batch.req_ids[: len(sampled_token_ids)]
        self._keep(batch.req_ids)
        going = []
        for row, (name, emitted) in enumerate(zip(names, sampled_token_ids, strict=True)):
            length = int(num_tokens_no_spec[row])
            if not emitted or length >= self.longest:
                continue
            last = partial(_last, token_ids_cpu[row], length)
            followed = self._follow(name, row, length, len(emitted), last)
            if followed is not None:
                going.append(followed)
        drafted: list[list[int]] = [[] for _ in names]
        for followed, tree in zip(going, self._draft(going), strict=True):
            room = min(self.tokens, followed.sequence.remaining - 1)
            drafted[followed.row] = list(tree.tokens[1 : 1 + max(0, room)])
        return drafted


def _last(ids: np.ndarray[Any, Any], length: int, count: int) -> list[int]:
    found: list[int] = ids[length - count : length].tolist()
    return found
