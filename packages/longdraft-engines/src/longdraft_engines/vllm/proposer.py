"""A proposer for vLLM's method ``custom_class`` that drafts with one of longdraft's drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from longdraft.engine.drafter import Drafter
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError, RequestError
from longdraft.trees.tree import root_tree


@dataclass
class TrackedRequest:
    """A request that gets drafts."""

    sequence: Sequence  # the request as longdraft's drafters see it
    req_index: int = -1  # the request's index in vLLM's input batch in this step
    new_token_ids: tuple[int, ...] = ()  # the tokens that this step added
    is_new: bool = True  # True until the drafter has observed the request
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)  # of this step; see :attr:`RoundResult.queries`

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens with KV in vLLM's cache: all but the newest token."""
        return len(self.sequence.prompt) + len(self.sequence.output) - 1


class Proposer(ABC):
    """Proposes drafts inside vLLM, in place of vLLM's own proposer.

    Tracks requests by vLLM's ids. A request that is missing from a step's batch (ended, aborted, preempted) is dropped.
    A preempted request that continues is tracked as a new request, whose prompt is all its tokens so far.

    Drafted tokens are the most probable ones, for sampled text too. As drafts are not sampled, the output keeps the
    target's distribution if vLLM accepts a drafted token with the token's probability under the target.

    Args:
        config: vLLM's ``VllmConfig``.

    Attributes:
        drafter: longdraft's drafter, made by :meth:`load_model`.
        options: the drafter's options by name, defaults included.
        runner: vLLM's model runner; :mod:`~longdraft_engines.vllm.plugin` sets it.
        max_model_len: limit of a request's tokens, prompt and output.
        free_slots: slots of the drafter's memory that no request has.
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
        self._next_sequence_id = 0

    @staticmethod
    def default_options() -> dict[str, Any]:
        """Returns the options with their defaults."""
        return {}

    @property
    def slots(self) -> int:
        """Number of requests that can get drafts at a time. Further requests get no drafts."""
        return int(self.config.scheduler_config.max_num_seqs)

    @abstractmethod
    def load_model(self, model: Any) -> None:
        """Makes the drafter. vLLM calls this method with the loaded target."""

    def prepare(self, requests: list[TrackedRequest]) -> None:
        """Copies the target's KV and queries that the drafter reads. Called in each step before drafting."""
        del requests

    @torch.inference_mode()
    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: NDArray[Any], token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:  # fmt: skip
        """Returns drafted tokens for each request of vLLM's input batch.

        Args:
            sampled_token_ids: the new tokens of each request; [] during its prefill.
            num_tokens_no_spec: (requests,) number of tokens, drafted tokens excluded.
            token_ids_cpu: (requests, max_model_len) token ids.
            slot_mappings: not used.
        """
        del slot_mappings
        if self.runner is None:
            raise CapabilityError(
                "vLLM has not run longdraft's plugin: install longdraft in vLLM's environment. If VLLM_PLUGINS is set, "
                "add longdraft to it."
            )
        batch = self.runner.input_batch
        for req_id in set(self._tracked) - set(batch.req_ids):
            self._drop(req_id)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        requests = []
        for req_index, new_token_ids in enumerate(sampled_token_ids):
            token_ids = token_ids_cpu[req_index, : int(num_tokens_no_spec[req_index])]
            if not new_token_ids or len(token_ids) >= self.max_model_len:
                continue
            request = self._track(batch.req_ids[req_index], req_index, token_ids, len(new_token_ids))
            if request is not None:
                requests.append(request)
        if requests:
            self.prepare(requests)
            for request in requests:
                self._observe(request)
            trees = self.drafter.propose([request.sequence for request in requests])
            for request, tree in zip(requests, trees, strict=True):
                max_drafted = max(0, min(self.num_speculative_tokens, request.sequence.remaining - 1))
                drafts[request.req_index] = list(tree.tokens[1 : 1 + max_drafted])  # without the root
        return drafts

    def _track(self, req_id: str, req_index: int, token_ids: NDArray[Any], num_new: int) -> TrackedRequest | None:
        """Returns the request after adding its last ``num_new`` tokens; None if no slot is free."""
        request = self._tracked.get(req_id)
        # With another number of tokens, the request missed a step.
        if request is not None and len(token_ids) != request.num_computed_tokens + 1 + num_new:
            self._drop(req_id)
            request = None
        if request is None:
            if not self.free_slots:
                return None
            max_new_tokens = self.max_model_len - len(token_ids) + num_new
            request = TrackedRequest(Sequence(self._next_sequence_id, token_ids[:-num_new].tolist(), max_new_tokens))
            request.sequence.slot, self._next_sequence_id = self.free_slots.pop(0), self._next_sequence_id + 1
            self._tracked[req_id] = request
        request.req_index, request.new_token_ids = req_index, tuple(token_ids[-num_new:].tolist())
        for token in request.new_token_ids:
            request.sequence.append(token)
        return request

    def _observe(self, request: TrackedRequest) -> None:
        """Tells the drafter the request's new tokens, as a round whose tree is the token before them alone."""
        sequence, new_token_ids = request.sequence, request.new_token_ids
        num_new, mode = len(new_token_ids), "prefill" if request.is_new else "full"
        root = root_tree(sequence.tokens[-num_new - 1])
        self.drafter.observe(
            RoundResult(
                sequence, root, num_new - 1, new_token_ids=new_token_ids, mode=mode,  # type: ignore[arg-type]
                queries=request.queries,
            )
        )  # fmt: skip
        request.is_new = False

    def _drop(self, req_id: str) -> None:
        """Stops tracking a request, and frees its slot."""
        request = self._tracked.pop(req_id)
        self.free_slots.append(request.sequence.slot)
        if not request.is_new:
            self.drafter.release(request.sequence)
