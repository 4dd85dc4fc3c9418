"""A proposer for vLLM's ``custom_class`` that drafts with one of our drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from longdraft.engine.drafter import Drafter
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError, RequestError
from longdraft.trees.tree import TokenTree


@dataclass
class TrackedRequest:
    """A request that is drafted for.

    Attributes:
        row: its row in the engine's batch, in this step. emitted: its new tokens in this step.
        new: the drafter has not observed it yet.
        queries: of this step, if the drafter needs any: see :class:`~longdraft.engine.round_result.Event`.
    """

    sequence: Sequence
    req_index: int = -1
    new_token_ids: tuple[int, ...] = ()
    is_new: bool = True
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def num_computed_tokens(self) -> int:
        """Count of tokens with KV in the engine's cache: all but the newest."""
        return len(self.sequence.prompt) + len(self.sequence.output) - 1


class Proposer(ABC):
    """Proposes drafts inside vLLM, in the place of its own proposer.

    Tracks requests by vLLM's ids. One that is missing from a step's batch (ended, aborted, preempted) is forgotten; if
    it comes back, it is a new one whose text so far is its prompt.

    Drafts are the most probable tokens, for sampled text too: vLLM accepts a drafted token with the probability that
    the target gives it, which is exact for drafts that are not sampled.

    Args:
        config: vLLM's ``VllmConfig``.

    Attributes:
        drafter: made by :meth:`load_model`.
        runner: vLLM's model runner; :mod:`~longdraft_engines.vllm.plugin` sets it.
        max_model_len: the most tokens of a text.
    """

    drafter: Drafter

    def __init__(self, config: Any) -> None:
        self.config = config
        self.num_speculative_tokens: int = config.speculative_config.num_speculative_tokens
        options = (getattr(config, "additional_config", None) or {}).get("longdraft") or {}
        self.options = self.default_options() | dict(options)
        if unknown := set(self.options) - set(self.default_options()):
            raise RequestError(
                f"additional_config['longdraft'] has no {sorted(unknown)[0]!r} for {type(self).__name__}: it takes "
                f"{', '.join(sorted(self.default_options())) or 'nothing'}."
            )
        self.runner: Any = None
        self.max_model_len = int(config.model_config.max_model_len)
        self.free_slots = list(range(self.slots))
        self._tracked: dict[str, TrackedRequest] = {}
        self._next = 0

    @staticmethod
    def default_options() -> dict[str, Any]:
        """The options and their defaults."""
        return {}

    @property
    def slots(self) -> int:
        """Count of requests drafted for at a time; others are decoded without drafts."""
        return int(self.config.scheduler_config.max_num_seqs)

    @abstractmethod
    def load_model(self, model: Any) -> None:
        """Makes the drafter. Called by vLLM with the loaded target."""

    def prepare(self, requests: list[TrackedRequest]) -> None:
        """Called before a step's drafts; copies what the drafter reads of the target."""
        del requests

    @torch.inference_mode()
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
        for name in set(self._tracked) - set(batch.req_ids):
            self._forget(name)
        drafted: list[list[int]] = [[] for _ in sampled_token_ids]
        tracked = []
        for req_index, emitted in enumerate(sampled_token_ids):
            text = token_ids_cpu[req_index, : int(num_tokens_no_spec[req_index])]
            if not emitted or len(text) >= self.max_model_len:
                continue
            request = self._track(batch.req_ids[req_index], req_index, text, len(emitted))
            if request is not None:
                tracked.append(request)
        if tracked:
            self.prepare(tracked)
            for request in tracked:
                self._observe(request)
            trees = self.drafter.propose([request.sequence for request in tracked])
            for request, tree in zip(tracked, trees, strict=True):
                room = min(self.num_speculative_tokens, request.sequence.remaining - 1)
                drafted[request.req_index] = list(tree.tokens[1 : 1 + max(0, room)])
        return drafted

    def _track(self, name: str, req_index: int, text: np.ndarray[Any, Any], new: int) -> TrackedRequest | None:
        """A request whose text has so many new tokens; None if no slot is free."""
        tracked = self._tracked.get(name)
        if tracked is not None and len(text) != tracked.num_computed_tokens + 1 + new:  # a step was missed
            self._forget(name)
            tracked = None
        if tracked is None:
            if not self.free_slots:
                return None
            tracked = TrackedRequest(Sequence(self._next, text[:-new].tolist(), self.max_model_len - len(text) + new))
            tracked.sequence.slot, self._next = self.free_slots.pop(0), self._next + 1
            self._tracked[name] = tracked
        tracked.req_index, tracked.new_token_ids = req_index, tuple(text[-new:].tolist())
        for token in tracked.new_token_ids:
            tracked.sequence.append(token)
        return tracked

    def _observe(self, request: TrackedRequest) -> None:
        s, emitted = request.sequence, request.new_token_ids
        root = TokenTree((s.tokens[-len(emitted) - 1],), (-1,))
        mode = "prefill" if request.is_new else "full"
        self.drafter.observe(
            RoundResult(
                s, root, len(emitted) - 1, new_token_ids=emitted, mode=mode,  # type: ignore[arg-type]
                queries=request.queries,
            )
        )  # fmt: skip
        request.is_new = False

    def _forget(self, name: str) -> None:
        request = self._tracked.pop(name)
        self.free_slots.append(request.sequence.slot)
        if not request.is_new:
            self.drafter.release(request.sequence)
