"""A proposer of vLLM's ``custom_class``: follows the engine's requests, and has one of our drafters draft for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longdraft.drafters.base import Drafter
from longdraft.errors import CapabilityError, RequestError
from longdraft.events import Event
from longdraft.sequence import Sequence
from longdraft.trees.tree import TokenTree


@dataclass
class Followed:
    """A request that is drafted for.

    Attributes:
        row: in the engine's batch, this step.
        emitted: tokens that came with it.
        new: whether the drafter has not met it yet.
    """

    sequence: Sequence
    row: int = -1
    emitted: tuple[int, ...] = ()
    new: bool = True


class Proposer(ABC):
    """Requests are known by the engine's ids. One that is not in the batch of a step (ended, aborted, preempted, put
    off) is forgotten; when it comes again, it is a new one, whose text so far is its prompt.

    Args:
        config: vLLM's ``VllmConfig``.

    Attributes:
        drafter: of ours; made by :meth:`load_model`.
        runner: vLLM's model runner; :mod:`~longdraft.engines.vllm.plugin` sets it.
    """

    drafter: Drafter

    def __init__(self, config: Any) -> None:
        self.config = config
        self.tokens: int = config.speculative_config.num_speculative_tokens
        self.longest: int = config.model_config.max_model_len
        given = (getattr(config, "additional_config", None) or {}).get("longdraft") or {}
        self.options = self.defaults() | dict(given)
        if unknown := set(self.options) - set(self.defaults()):
            raise RequestError(
                f"additional_config['longdraft'] has no {sorted(unknown)[0]!r} for {type(self).__name__}: it takes "
                f"{', '.join(sorted(self.defaults())) or 'nothing'}."
            )
        self.runner: Any = None
        self._followed: dict[str, Followed] = {}
        self._free = list(range(self.slots))
        self._next = 0

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

    def prepare(self, followed: list[Followed]) -> None:
        """Before a step's texts are drafted for: brings along what the drafter reads of the target."""
        del followed

    @torch.inference_mode()
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
        for gone in set(self._followed) - set(batch.req_ids):
            self._forget(gone)
        going = []
        for row, (name, emitted) in enumerate(zip(names, sampled_token_ids, strict=True)):
            length = int(num_tokens_no_spec[row])
            if not emitted or length >= self.longest:
                continue
            followed = self._follow(name, token_ids_cpu[row, :length], len(emitted), name in batch.greedy_reqs)
            if followed is not None:
                followed.row, followed.emitted = row, tuple(emitted)
                going.append(followed)
        self.prepare(going)
        for followed in going:
            self._observe(followed)
        drafted: list[list[int]] = [[] for _ in names]
        if going:
            trees = self.drafter.propose([followed.sequence for followed in going])
            for followed, tree in zip(going, trees, strict=True):
                room = min(self.tokens, followed.sequence.remaining - 1)
                drafted[followed.row] = list(tree.tokens[1 : 1 + max(0, room)])
        return drafted

    def _follow(self, name: str, text: np.ndarray[Any, Any], emitted: int, greedy: bool) -> Followed | None:
        """A request with its new tokens; None where no slot is free."""
        followed = self._followed.get(name)
        if followed is not None and len(text) == len(followed.sequence.tokens) + emitted:
            for token in text[len(text) - emitted :]:
                followed.sequence.append(int(token))
            return followed
        if followed is not None:  # a step of it was not shown to us
            self._forget(name)
        if not self._free:
            return None
        prompt: list[int] = text[: len(text) - emitted].tolist()
        sequence = Sequence(self._next, prompt, self.longest - len(prompt), greedy=greedy)
        sequence.slot, self._next = self._free.pop(0), self._next + 1
        for token in text[len(prompt) :]:
            sequence.append(int(token))
        self._followed[name] = Followed(sequence)
        return self._followed[name]

    def _observe(self, followed: Followed) -> None:
        """Tells the drafter what came."""
        s, emitted = followed.sequence, followed.emitted
        root = TokenTree((s.tokens[-len(emitted) - 1],), (-1,))
        mode = "prefill" if followed.new else "full"
        self.drafter.observe(Event(s, root, emitted=emitted, came=emitted, mode=mode))  # type: ignore[arg-type]
        followed.new = False

    def _forget(self, name: str) -> None:
        followed = self._followed.pop(name)
        self._free.append(followed.sequence.slot)
        if not followed.new:
            self.drafter.release(followed.sequence)
