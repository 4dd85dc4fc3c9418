"""Logits processors for request options: penalties and log-probabilities.

A processor belongs to one request. The engine calls it for each token to emit, in order, with all token ids so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

# (token ids so far (1, n), logits of the next token (1, vocabulary)) -> the logits, changed
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ProcessorFactories = Sequence[Callable[[], Processor]]


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability, which is None for the first token of a prompt."""

    token_id: int
    logprob: float | None
    # (token id, log-probability) of the most probable tokens at the token's position
    top_logprobs: list[tuple[int, float]]


@dataclass
class Penalties:
    """OpenAI's presence and frequency penalties, for tokens after the first ``prompt_len``, which are the prompt."""

    prompt_len: int
    presence: float = 0.0
    frequency: float = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens, counts = input_ids[0, self.prompt_len :].unique(return_counts=True)
        scores[0, tokens] -= self.presence + self.frequency * counts.to(scores.dtype)
        return scores


@dataclass
class LogprobRecorder:
    """Records the model's log-probabilities. It must be the first processor: later ones change the distribution."""

    num_logprobs: int  # how many of the most probable tokens to record at each position
    # positions that ``pop`` has not returned yet: (the top log-probabilities, their token ids, the log-probabilities of
    # all tokens (vocabulary,))
    pending: deque[tuple[list[float], list[int], torch.Tensor]] = field(default_factory=deque)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._add_position(scores[0])
        return scores

    def _add_position(self, logits: torch.Tensor) -> None:
        logprobs = logits.float().log_softmax(-1)
        topk = logprobs.topk(max(1, self.num_logprobs))  # at least one; pop() cuts the list
        self.pending.append((topk.values.tolist(), topk.indices.tolist(), logprobs))

    def pop(self, token: int) -> TokenLogprob:
        """Takes the oldest pending position, at which ``token`` was emitted."""
        topk_logprobs, topk_ids, logprobs = self.pending.popleft()
        top = list(zip(topk_ids, topk_logprobs, strict=True))[: self.num_logprobs]
        return TokenLogprob(token, float(logprobs[token]), top)


@dataclass
class PromptLogprobRecorder(LogprobRecorder):
    """Also records log-probabilities of the prompt's tokens."""

    prompt: Sequence[int] = ()
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens, without the first

    def prompt_logits(self, start: int, logits: torch.Tensor) -> None:
        """Records logits (n, vocabulary) at n positions of the prompt, from ``start`` on. The engine calls it."""
        for token_logits, token in zip(logits, self.prompt[start + 1 :], strict=False):
            self._add_position(token_logits)
            self.prompt_logprobs.append(self.pop(token))
