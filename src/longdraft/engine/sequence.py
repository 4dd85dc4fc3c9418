"""One sequence: its tokens while decoding, its sampler, the rules that end it, and its counters."""

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
    """Counts the rounds of one sequence; the names are those of its :class:`~longdraft.Result`."""

    cached_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    partial_rounds: int = 0
    partial_tokens: int = 0


@dataclass(eq=False, repr=False)
class Sequence:
    """State of one sequence.

    Token ids live in one preallocated tensor, so processors read them without copies. New ones are written there when
    somebody reads it, all at once: a write of a single number makes the host wait for a GPU.

    Attributes:
        index: its place in the batch.
        prompt: prompt token ids.
        max_new_tokens: emitted at most.
        device: where logits are, and so where processors want the ids.
        processor_prompt: the prompt as processors and stopping criteria see it, if that differs: a padded row of transformers,
            whose padding the model never sees.
        greedy: whether its tokens are the most probable ones, not sampled. Drafters may draft accordingly.
        sampler: decides its tokens from the target's logits; None if it is set before the sequence is decoded. Drafters
            may rehearse coming tokens with it, but not sample.
        stop_rules: called in order after each emitted token; the first reason that one returns ends the sequence.
        tenant: the user whose request this is.
        predicted: tokens that the output may contain, for lookups.
        reuse: whether kept rows of its prompt's beginning may be taken.
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
        shown = self.prompt if self.processor_prompt is None else self.processor_prompt
        self._start = len(shown)
        self._ids = torch.empty(len(shown) + self.max_new_tokens, dtype=torch.long, device=self.device)
        self._ids[: len(shown)] = to_device(shown, self.device, torch.long)
        self._written = 0  # tokens of the output that are in it

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def length(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def max_length(self) -> int:
        """Tokens of prompt and output at most."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - len(self.output)

    def input_ids(self) -> torch.Tensor:
        """(n,) ids of prompt, as it is shown, and output: a view."""
        end = self._start + len(self.output)
        if self._written < len(self.output):
            new = to_device(self.output[self._written :], self._ids.device, torch.long)
            self._ids[self._start + self._written : end] = new
            self._written = len(self.output)
        return self._ids[:end]

    def emit(self, token: int) -> bool:
        """Appends a token and returns whether it was the last."""
        self.append(token)
        reasons = (rule(self) for rule in self.stop_rules)
        self.finish_reason = next((r for r in reasons if r), None) or ("length" if not self.remaining else None)
        return self.finish_reason is not None

    def append(self, token: int) -> None:
        self.output.append(token)

    def fork(self) -> Sequence:
        """Returns a copy in the same slot that goes on by itself; it shares the sampler."""
        twin = copy(self)
        twin.output, twin._ids = list(self.output), self._ids.clone()
        return twin
