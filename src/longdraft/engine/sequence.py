"""A sequence: the state of one request in the engine."""

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
# Called with the sequence after each emitted token. Returns the reason to finish, or None to continue.
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
    """The tokens, the sampler, the stop rules and the statistics of one sequence.

    A preallocated tensor has the token ids too, so processors read the ids without a copy. Emitted ids are written to
    the tensor when :meth:`input_ids` is called, all at once, because each write costs a copy to the device.

    Attributes:
        index: the sequence's number in the engine.
        slot: the sequence's slot in the KV cache; the engine sets it.
        prompt: token ids of the prompt.
        max_new_tokens: maximum number of emitted tokens.
        device: the device of the logits, where processors need the ids.
        processor_prompt: the prompt with the padding that ``generate`` shows to processors and stopping criteria; None:
            there is no padding. The model never reads padding.
        greedy: whether decoding is greedy; drafters may read this.
        sampler: samples the tokens; set before decoding begins. Drafters may fork the sampler, but not sample with it.
        stop_rules: called in order after each emitted token; the first reason returned ends the sequence.
        tenant: the user who sent the request.
        predicted: tokens that the output may contain; lookups search them.
        reuse: whether cached KV of a prefix may be reused.
        is_started: True once the prefill has begun, so that the slot has KV of this sequence.
        output: token ids emitted so far.
        finish_reason: why the sequence has finished; None while it is decoded.
        stats: counts of tokens and rounds.
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
    is_started: bool = field(init=False, default=False)
    output: list[int] = field(init=False, default_factory=list)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stats: SequenceStats = field(init=False, default_factory=SequenceStats)

    def __post_init__(self) -> None:
        self.slot = self.index
        prompt = self.prompt if self.processor_prompt is None else self.processor_prompt
        self._processor_prompt_len = len(prompt)
        self._input_ids = torch.empty(len(prompt) + self.max_new_tokens, dtype=torch.long, device=self.device)
        self._input_ids[: len(prompt)] = to_device(prompt, self.device, torch.long)
        self._num_written_outputs = 0  # number of output tokens that are in _input_ids already

    @property
    def tokens(self) -> list[int]:
        """The token ids of prompt and output."""
        return self.prompt + self.output

    @property
    def length(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and output."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be emitted."""
        return self.max_new_tokens - len(self.output)

    @property
    def in_prefill(self) -> bool:
        """True until the whole prompt has been read, which emits the first token."""
        return not self.output

    @property
    def max_draft_depth(self) -> int:
        """Maximum depth of a tree. An accepted path of depth k emits k + 1 tokens, so deeper nodes need no draft."""
        return self.remaining - 1

    def input_ids(self) -> torch.Tensor:
        """Returns the token ids (n,) that processors read: ``processor_prompt`` or ``prompt``, then ``output``."""
        end = self._processor_prompt_len + len(self.output)
        if self._num_written_outputs < len(self.output):
            new_ids = to_device(self.output[self._num_written_outputs :], self._input_ids.device, torch.long)
            self._input_ids[self._processor_prompt_len + self._num_written_outputs : end] = new_ids
            self._num_written_outputs = len(self.output)
        return self._input_ids[:end]

    def emit(self, token: int) -> bool:
        """Appends a token, calls the stop rules, and returns True if the sequence has finished."""
        self.append(token)
        reasons = (rule(self) for rule in self.stop_rules)
        self.finish_reason = next((r for r in reasons if r), None) or ("length" if not self.remaining else None)
        return self.finish_reason is not None

    def append(self, token: int) -> None:
        """Appends a token without calling the stop rules."""
        self.output.append(token)

    def fork(self) -> Sequence:
        """Returns a copy in the same slot, with output tokens of its own. The sampler is shared with the copy."""
        forked = copy(self)
        forked.output, forked._input_ids = list(self.output), self._input_ids.clone()
        return forked
