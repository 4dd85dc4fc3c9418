"""One sequence: its tokens while decoding, what a round did to it, and the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from longdraft.trees.draft_sampler import DraftSampler

FinishReason = Literal["eos", "stop", "length", "cancelled"]


class Sequence:
    """State of one sequence. Token ids live in one preallocated tensor, so processors read them without copies.

    Args:
        index: its place in the batch.
        prompt: prompt token ids.
        max_new_tokens: emitted at most.
        device: where logits are, and so where processors want the ids.
        shown: the prompt as processors and stopping criteria see it, where that is not the prompt: a padded row of
            transformers, whose padding the model never sees.
        greedy: its tokens are picked, not drawn; the same for a whole batch. Drafters may draft accordingly.

    Attributes:
        draft_sampler: what a drafter that samples does it with; None where it does not, or tokens are picked.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        max_new_tokens: int,
        device: torch.device | str = "cpu",
        shown: list[int] | None = None,
        greedy: bool = True,
    ) -> None:
        self.index = index
        self.slot = index
        self.prompt = prompt
        self.greedy = greedy
        self.output: list[int] = []
        self.max_new_tokens = max_new_tokens
        self.finish_reason: FinishReason | None = None
        self.draft_sampler: DraftSampler | None = None
        self.rounds = 0
        self.partial_rounds = 0
        self.partial_tokens = 0
        self.rolled_back = 0
        self.drafted = 0
        self.accepted = 0
        seen = prompt if shown is None else shown
        self._start = len(seen)
        self._ids = torch.empty(len(seen) + max_new_tokens, dtype=torch.long, device=device)
        self._ids[: len(seen)] = torch.tensor(seen, dtype=torch.long)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - len(self.output)

    def ids(self) -> torch.Tensor:
        """(n,) ids of prompt, as it is shown, and output, a view."""
        return self._ids[: self._start + len(self.output)]

    def append(self, token: int) -> None:
        self._ids[self._start + len(self.output)] = token
        self.output.append(token)

    def fork(self) -> Sequence:
        """A sequence that has come as far as this one and goes on by itself, in the same slot."""
        twin = Sequence(self.index, self.prompt, self.max_new_tokens, self._ids.device, greedy=self.greedy)
        twin.slot, twin._start, twin._ids = self.slot, self._start, self._ids.clone()
        twin.output = list(self.output)
        return twin

    def follow(self, other: Sequence) -> None:
        """Takes the output of another sequence with the same prompt for its own."""
        self.output, self.finish_reason = list(other.output), other.finish_reason
        self._ids.copy_(other._ids)


# Told the sequence after each emitted token: a reason to finish, or None.
StopRule = Callable[[Sequence], "FinishReason | None"]


@dataclass(frozen=True)
class Step:
    """What one round did to one sequence.

    Attributes:
        sequence: index in the batch.
        token_ids: emitted tokens; empty while prefilling.
        from_draft: how many of them, counted from the first, were drafted; the rest is the bonus token.
        drafted: nodes that were drafted this round.
        accepted: drafted nodes accepted this round.
        mode: "prefill" while the prompt is read; "full" for a verification on the whole cache, "partial" on a partial
            one, "refresh" for a full one that puts partial ones right (SpecPV, section 3).
        seconds: wall time of the round, carried by the first of its steps; the others say 0.0.
        prefilled: prompt tokens read so far (mode "prefill").
        finish_reason: set on a sequence's last step.
    """

    sequence: int
    token_ids: tuple[int, ...]
    from_draft: int
    drafted: int
    accepted: int
    mode: Literal["prefill", "full", "partial", "refresh"]
    seconds: float
    prefilled: int = 0
    finish_reason: FinishReason | None = None


@dataclass
class Result:
    """A finished sequence. Figures are defined in docs/figures.md; those of a batch hold for the whole batch.

    Attributes:
        text: the output, without a stop string that ended it; empty when there is no tokenizer.
        token_ids: emitted tokens, EOS included.
        rounds: target verification forwards that this sequence took part in, partial ones among them.
        partial_rounds: those on a partial cache. partial_tokens: tokens that they accepted. rolled_back: how many of
            these a full one refuted before they were emitted.
        prefill_seconds, decode_seconds: wall time of reading the prompts and of everything after.
        peak_memory_bytes: peak of the process (CPU) or of the allocator (GPU).
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    method: str
    exact: bool
    finish_reason: FinishReason
    prefill_seconds: float
    decode_seconds: float
    rounds: int
    drafted: int = 0
    accepted: int = 0
    peak_memory_bytes: int = 0
    partial_rounds: int = 0
    partial_tokens: int = 0
    rolled_back: int = 0
    from_draft: list[bool] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """New tokens / decode seconds, prefill excluded; 0.0 when nothing was decoded after the prefill."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds > 0 and self.rounds else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """New tokens / verification forwards: bonus tokens count, the prefill's token does not."""
        return (self.new_tokens - 1) / self.rounds if self.rounds else 0.0
