"""Logits processors for clients' options: penalties and log-probabilities.

Each belongs to one request. longdraft calls it once for each emitted token, in order, with the text so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ProcessorFactories = Sequence[Callable[[], Processor]]


@dataclass
class Penalties:
    """OpenAI's presence and frequency penalties, on the output's tokens and not the prompt's (``prompt_len`` tokens)."""

    prompt_len: int
    presence: float = 0.0
    frequency: float = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens, counts = input_ids[0, self.prompt_len :].unique(return_counts=True)
        scores[0, tokens] -= self.presence + self.frequency * counts.to(scores.dtype)
        return scores


@dataclass
class LogprobRecorder:
    """Keeps log-probabilities of the model's own distribution; must come before all other processors.

    Attributes:
        best: how many of the most probable tokens to keep at each position.
        rows: the positions that have not been taken yet: the largest log-probabilities, their tokens, and all
            (vocabulary,) log-probabilities.
    """

    num_logprobs: int
    pending: deque[tuple[list[float], list[int], torch.Tensor]] = field(default_factory=deque)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._keep(scores[0])
        return scores

    def _keep(self, logits: torch.Tensor) -> None:
        logprobs = logits.float().log_softmax(-1)
        largest = logprobs.topk(max(1, self.num_logprobs))
        self.pending.append((largest.values.tolist(), largest.indices.tolist(), logprobs))

    def pop(self, token: int) -> tuple[float, list[tuple[int, float]]]:
        """The emitted token's log-probability at the next position, and the most probable tokens with theirs."""
        values, tokens, logprobs = self.pending.popleft()
        return float(logprobs[token]), list(zip(tokens, values, strict=True))[: self.num_logprobs]


@dataclass
class PromptLogprobRecorder(LogprobRecorder):
    """Those of a prompt's own tokens too.

    Attributes:
        prompt_logprobs: for each token of the prompt but the first, what :meth:`pop` returns.
    """

    prompt: Sequence[int] = ()
    prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)

    def prompt_logits(self, start: int, logits: torch.Tensor) -> None:
        for row, token in zip(logits, self.prompt[start + 1 :], strict=False):
            self._keep(row)
            self.prompt_logprobs.append(self.pop(token))
