"""Picking a token from the target's logits: the one place where a distribution is processed and drawn from.

The processors are transformers' own, so a setting means here what it means in ``generate``. They are evaluated
with the full text up to the node in question, so penalties and bans see the node's own path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# Takes token ids (1, n) and scores (1, vocabulary), returns scores: transformers' LogitsProcessor interface.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sampling:
    """How the target's distribution is processed. Temperature 0 is greedy.

    Raises:
        ValueError: for a value outside its range, from transformers' processors or from here.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        # transformers checks what it builds; at these values nothing would be built, so nothing would complain.
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie above 0 and be at most 1, got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie between 0 and 1, got {self.min_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        self.processors()  # refuses bad values now rather than after the prefill

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def processors(self) -> LogitsProcessorList:
        """The processors in the order that ``generate`` applies them."""
        processors = LogitsProcessorList()
        if self.repetition_penalty is not None and self.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.greedy:
            return processors
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1.0:
            processors.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            processors.append(MinPLogitsWarper(self.min_p))
        return processors


@dataclass
class Picker:
    """Decides one token from the target's logits at a node.

    A pick happens once for every emitted token, in order. So a stateful processor sees just the calls that plain
    decoding would make, and a seed gives the same text whatever was drafted.

    Attributes:
        greedy: take the most probable token instead of drawing.
        processors: applied to the logits first; empty for the plain distribution.
        generator: source of randomness; None for torch's global one.
    """

    greedy: bool
    processors: LogitsProcessorList
    generator: torch.Generator | None = None

    @property
    def plain_greedy(self) -> bool:
        """True when every node's token is the argmax of its logits, whatever the path."""
        return self.greedy and len(self.processors) == 0

    def rehearsal(self) -> Picker:
        """A picker that picks what this one is about to pick wherever the logits are the same, and leaves it as it is.

        Its draws are this one's coming draws: a multinomial draw is the argmax of p / e with one exponential e a token,
        and the e are the same. So from two like distributions both mostly pick the same token.
        """
        if self.greedy:
            return Picker(True, copy.deepcopy(self.processors))
        own = self.generator
        device = torch.device("cpu") if own is None else own.device
        twin = torch.Generator(device)
        twin.set_state(torch.get_rng_state() if own is None else own.get_state())
        return Picker(False, copy.deepcopy(self.processors), twin)

    def pick(self, text: torch.Tensor, logits: torch.Tensor) -> int:
        """Args:
        text: (n,) token ids from the prompt's first to the node.
        logits: (vocabulary,) the target's raw logits at the node.
        """
        scores = logits[None].float()
        if len(self.processors):
            scores = self.processors(text[None], scores.clone())
        if self.greedy:
            return int(scores.argmax())
        p = torch.softmax(scores, dim=-1)
        return int(torch.multinomial(p, num_samples=1, generator=self.generator))
