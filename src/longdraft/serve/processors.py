"""Logits processors for what clients ask for: penalties, biases, and the log-probabilities of what was said.

Each belongs to one request. longdraft calls a processor once for every emitted token, in order, with the text so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Penalties:
    """Presence and frequency penalties, as OpenAI defines them: of the output's tokens, not the prompt's.

    Attributes:
        prompt: tokens of the prompt.
    """

    prompt: int
    presence: float = 0.0
    frequency: float = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said, counts = input_ids[0, self.prompt :].unique(return_counts=True)
        scores[0, said] -= self.presence + self.frequency * counts.to(scores.dtype)
        return scores


@dataclass
class Bias:
    """Numbers that are added to tokens' logits."""

    by_token: Mapping[int, float]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = torch.tensor(list(self.by_token), device=scores.device)
        scores[0, tokens] += torch.tensor(list(self.by_token.values()), dtype=scores.dtype, device=scores.device)
        return scores


@dataclass
class LogProbs:
    """Keeps the log-probabilities of the model's own distribution, before anything else is applied.

    Attributes:
        most: likeliest tokens that are kept of each position.
        rows: of each position, (vocabulary,) log-probabilities' ``most`` largest, their tokens, and all of them, until
            the token that was said is known.
    """

    most: int
    rows: list[tuple[list[float], list[int], torch.Tensor]] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        log_probs = scores[0].float().log_softmax(-1)
        best = log_probs.topk(max(1, self.most))
        self.rows.append((best.values.tolist(), best.indices.tolist(), log_probs))
        return scores

    def take(self, token: int) -> tuple[float, list[tuple[int, float]]]:
        """Of the next position: the log-probability of the token that was said, and the likeliest ones with theirs."""
        values, tokens, log_probs = self.rows.pop(0)
        return float(log_probs[token]), list(zip(tokens, values, strict=True))[: self.most]
