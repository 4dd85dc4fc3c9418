"""A proposer for vLLM's ``custom_class`` that drafts with one of our drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import numpy as np

from longdraft.errors import CapabilityError, RequestError
from longdraft_engines.requests import RequestTracker


class Proposer(RequestTracker, ABC):
    """Proposes drafts inside vLLM, in the place of its own proposer.

    Args:
        config: vLLM's ``VllmConfig``.

    Attributes:
        drafter: made by :meth:`load_model`.
        runner: vLLM's model runner; :mod:`~longdraft_engines.vllm.plugin` sets it.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.tokens: int = config.speculative_config.num_speculative_tokens
        options = (getattr(config, "additional_config", None) or {}).get("longdraft") or {}
        self.options = self.defaults() | dict(options)
        if unknown := set(self.options) - set(self.defaults()):
            raise RequestError(
                f"additional_config['longdraft'] has no {sorted(unknown)[0]!r} for {type(self).__name__}: it takes "
                f"{', '.join(sorted(self.defaults())) or 'nothing'}."
            )
        self.runner: Any = None
        super().__init__(self.slots, config.model_config.max_model_len)

    @staticmethod
    def defaults() -> dict[str, Any]:
        """The options and their defaults."""
        return {}

    @property
    def slots(self) -> int:
        """Count of requests drafted for at a time; others are decoded without drafts."""
        return int(self.config.scheduler_config.max_num_seqs)

    @abstractmethod
    def load_model(self, model: Any) -> None:
        """Makes the drafter. Called by vLLM with the loaded target."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray[Any, Any],
        token_ids_cpu: np.ndarray[Any, Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafted tokens for each row of the engine's batch.

        Args:
            sampled_token_ids: the new tokens of each row; none while its prompt is read.
            num_tokens_no_spec, token_ids_cpu: (rows,) length and (rows, longest) tokens of its text, with the new ones.
        """
        del slot_mappings
        if self.runner is None:
            raise CapabilityError(
                "vLLM has not run longdraft's plugin: install longdraft in vLLM's environment, and name longdraft in "
                "VLLM_PLUGINS where that is set."
            )
        batch = self.runner.input_batch
        names: list[str] = batch.req_ids[: len(sampled_token_ids)]
        self._forget_others(batch.req_ids)
        tracked = []
        for row, (name, emitted) in enumerate(zip(names, sampled_token_ids, strict=True)):
            length = int(num_tokens_no_spec[row])
            if not emitted or length >= self.longest:
                continue
            last = partial(_last, token_ids_cpu[row], length)
            request = self._track(name, row, length, len(emitted), last)
            if request is not None:
                tracked.append(request)
        drafted: list[list[int]] = [[] for _ in names]
        for request, tree in zip(tracked, self._draft(tracked), strict=True):
            room = min(self.tokens, request.sequence.remaining - 1)
            drafted[request.row] = list(tree.tokens[1 : 1 + max(0, room)])
        return drafted


def _last(ids: np.ndarray[Any, Any], length: int, count: int) -> list[int]:
    tokens: list[int] = ids[length - count : length].tolist()
    return tokens
