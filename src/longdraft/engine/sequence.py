"""A sequence: its tokens, its sampler, its stop rules, and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

import torch

from longdraft.attention.transfer import to_device
from longdraft.engine.sampler import Sampler

FinishReason = Literal["eos", "stop", "length", "cancelled"]
# Called with the sequence after each emitted token; returns a reason to finish, or None.
StopRule = Callable[["Sequence"], FinishReason | None]


@dataclass
class SequenceStats:
    """Statistics of one sequence. The fields are those of :class:`~longdraft.Result`."""

    cached_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    partial_rounds: int = 0
    partial_tokens: int = 0


@dataclass(eq=False, repr=False)
class Sequence:
    """State of one sequence.

    Token ids are also in one preallocated tensor, so processors read them without a copy. New ids are written there in
    one go when the tensor is read, for each write makes the host wait for a GPU.

    Attributes:
        index: its number in the engine.
        prompt: prompt token ids.
        max_new_tokens: most emitted tokens.
        device: the device of the logits, where processors need the ids.
        processor_prompt: the prompt that processors and stopping criteria see, if another: in ``generate`` that with
            padding, which the model never sees.
        greedy: whether decoding is greedy. Drafters may draft accordingly.
        sampler: samples its tokens; None if it is set later, before decoding. Drafters may fork it, but not sample.
        stop_rules: called in order after each emitted token; the first reason that is returned ends the sequence.
        tenant: the user of the request.
        predicted: tokens that the output may contain, for lookups.
        reuse: whether a cached prefix may be reused.
    """

    index: int
    prompt: list[int]
    max_new_tokens: int
    device: torch.device | str = "cpu"
    processor_prompt: list[int] | None = None
    greedy: bool = True
    sampler: Sampler = None  # type: ignore[assignment]
    stop_rules: Iterable[StopRule] = ()
    tenant: str | None = None
    predicted: SequenceOf[int] = ()
    reuse: bool = True
    output: list[int] = field(init=False, default_factory=list)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stats: SequenceStats = field(init=False, default_factory=SequenceStats)

    def __post_init__(self) -> None:
        self.slot = self.index
        prompt = self.prompt if self.processor_prompt is None else self.processor_prompt
        self._prompt_len = len(prompt)
        self._input_ids = torch.empty(len(prompt) + self.max_new_tokens, dtype=torch.long, device=self.device)
        self._input_ids[: len(prompt)] = to_device(prompt, self.device, torch.long)
        self._num_written = 0  # output tokens in the tensor

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def length(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and output."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - len(self.output)

    def input_ids(self) -> torch.Tensor:
        """Returns (n,) ids of ``processor_prompt`` and output, as a view."""
        end = self._prompt_len + len(self.output)
        if self._num_written < len(self.output):
            new = to_device(self.output[self._num_written :], self._input_ids.device, torch.long)
            self._input_ids[self._prompt_len + self._num_written : end] = new
            self._num_written = len(self.output)
        return self._input_ids[:end]

    def emit(self, token: int) -> bool:
        """Appends a token and returns whether it was the last."""
        self.append(token)
        reasons = (rule(self) for rule in self.stop_rules)
        self.finish_reason = next((r for r in reasons if r), None) or ("length" if not self.remaining else None)
        return self.finish_reason is not None

    def append(self, token: int) -> None:
        self.output.append(token)

    def fork(self) -> Sequence:
        """Returns an independent copy in the same slot, with the same sampler."""
        forked = copy(self)
        forked.output, forked._input_ids = list(self.output), self._input_ids.clone()
        return forked
