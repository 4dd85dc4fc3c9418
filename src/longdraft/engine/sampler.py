"""The sampler: the one place where the target's distribution is processed and a token chosen from it.

The processors are transformers' own, so a setting means what it means in ``generate``. They see the full text up to a
node, so penalties and bans apply along the node's own path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longdraft.engine import logits_processors as row_processors
from longdraft.errors import RequestError
from longdraft.options import check_number, whole_number

# Takes token ids (1, n) and scores (1, vocabulary), returns scores: transformers' LogitsProcessor interface.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Processors that read scores alone: applied to a draft's likeliest tokens, they do about what they do to all.
_BY_SCORES = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
_TINY = 1e-30  # for a random number of 0


class SampleNoise:
    """The random numbers of one sequence's samples: a sample of p is the argmax of p / e, one exponential e a token.

    It is also the argmax of log p - log e. A drafter that subtracts the log e of coming samples from its own
    log-probabilities mostly finds the tokens that will be sampled (Daliri et al. 2024, arXiv:2408.07978).

    Args:
        generator: nobody else uses it meanwhile; None: torch's global one, whose numbers are never known ahead.
        known: the numbers of coming samples are known ahead.
    """

    def __init__(self, generator: torch.Generator | None, is_predictable: bool = True) -> None:
        self._generator, self._known = generator, is_predictable and generator is not None
        # Made ahead and not used yet, each with the generator's state before it.
        self._made: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._like: torch.Tensor | None = None

    def sample(self, probabilities: torch.Tensor) -> int:
        """Samples a token with these probabilities (vocabulary,)."""
        self._like = probabilities
        numbers = self._made.popleft()[1] if self._made else self._draw(probabilities)
        return int((probabilities / numbers).argmax())

    def peek(self, count: int) -> torch.Tensor | None:
        """(vocabulary,) exponentials of the sample after ``count`` others; None if they are not known beforehand."""
        if not self._known or self._like is None or self._generator is None:
            return None
        while len(self._made) <= count:
            self._made.append((self._generator.get_state(), self._draw(self._like)))
        return self._made[count][1]

    def advance(self, count: int) -> None:
        """Skips the numbers of ``count`` samples, which were made with those of :meth:`peek`."""
        for _ in range(count):
            self._made.popleft()

    def restore_generator(self) -> None:
        """Leaves the generator as if nothing had been made ahead."""
        if self._made and self._generator is not None:
            self._generator.set_state(self._made[0][0])
            self._made.clear()

    def fork_for_draft(self) -> SampleNoise:
        """Returns the same coming numbers without using them up here; others where they are not to be known."""
        device = torch.device("cpu") if self._generator is None else self._generator.device
        generator = torch.Generator(device)
        if self._generator is not None and not self._known:
            return SampleNoise(generator.manual_seed(self._generator.initial_seed() ^ 1), is_predictable=False)
        generator.set_state(torch.get_rng_state() if self._generator is None else self._generator.get_state())
        twin = SampleNoise(generator)
        twin._made, twin._like = self._made.copy(), self._like
        return twin

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like).exponential_(1, generator=self._generator)


class WindowedRepetitionPenalty(LogitsProcessor):
    """transformers' repetition penalty on the last ``window`` tokens of the text (TokenSwift's contextual penalty)."""

    def __init__(self, penalty: float, window: int) -> None:
        self._penalty, self._window = RepetitionPenaltyLogitsProcessor(penalty), window

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        penalised: torch.Tensor = self._penalty(input_ids[:, -self._window :], scores)
        return penalised


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "at least 0"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda x: x > 0, "above 0"),
}


@dataclass(frozen=True)
class Sampling:
    """Settings that process the target's distribution.

    Attributes:
        temperature: 0 is greedy; 1 is the model's own distribution.
        top_k: sample from this many most probable tokens; None and 0: from all.
        top_p: sample from the fewest tokens that have this probability together, above 0 and at most 1.
        min_p: sample from tokens with at least this share of the best one's probability, 0 to 1.
        repetition_penalty: above 1 makes tokens of the text less likely, below 1 more likely.
        repetition_window: last tokens of the text that the penalty applies to; None: all of them.
        foresee: drafts know the random numbers of coming samples. The text is the same without, drafts are worse.

    Raises:
        RequestError: a value of a wrong kind or outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_window: int | None = None
    foresee: bool = True

    def __post_init__(self) -> None:
        for name, (fits, range_) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name == "temperature":
                check_number(name, value)
                if not fits(value):
                    raise RequestError(f"{name} must be {range_}, got {value}")
        for name, least in (("top_k", 0), ("repetition_window", 1)):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least)
        if self.repetition_window is not None and self.repetition_penalty is None:
            raise RequestError("repetition_window says where repetition_penalty counts: give that too")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def processors(self, first: Iterable[Processor] = ()) -> LogitsProcessorList:
        """Returns the processors in the order that ``generate`` applies them, after the ``first`` ones."""
        processors = LogitsProcessorList(first)
        if self.repetition_penalty is not None and self.repetition_penalty != 1.0:
            if self.repetition_window is None:
                processors.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
            else:
                processors.append(WindowedRepetitionPenalty(float(self.repetition_penalty), self.repetition_window))
        if self.greedy:
            return processors
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            processors.append(TopKLogitsWarper(int(self.top_k)))
        if self.top_p is not None and self.top_p < 1.0:
            processors.append(row_processors.FastTopP(float(self.top_p)))
        if self.min_p:
            processors.append(MinPLogitsWarper(float(self.min_p)))
        return processors


@runtime_checkable
class PromptLogitsReader(Protocol):
    """A logits processor that sees the prompt's logits too, for which all of the prompt is read."""

    def prompt_logits(self, start: int, logits: torch.Tensor) -> None:
        """Takes the (rows, vocabulary) logits behind the prompt's tokens from ``start`` on; they are not processed."""


@dataclass
class Sampler:
    """Decides one token from the target's logits at a node.

    It is called once for every emitted token, in order. So a stateful processor sees the calls that plain decoding
    would make and no others, and a seed gives the same text whatever was drafted.

    Attributes:
        greedy: take the most probable token instead of sampling.
        processors: applied to the logits first; empty for the plain distribution.
        noise: the random numbers; by default from torch's global generator.
    """

    greedy: bool
    processors: LogitsProcessorList
    noise: SampleNoise = field(default_factory=lambda: SampleNoise(None))

    @property
    def prompt_logits_reader(self) -> PromptLogitsReader | None:
        """The first processor that sees the prompt's logits."""
        return next((p for p in self.processors if isinstance(p, PromptLogitsReader)), None)

    @property
    def is_argmax(self) -> bool:
        """True if every node's token is the argmax of its logits, whatever the path."""
        return self.greedy and len(self.processors) == 0

    @property
    def is_noise_known(self) -> bool:
        """True if the random numbers of coming samples are known beforehand."""
        return not self.greedy and self.noise.peek(0) is not None

    def fork_for_draft(self) -> Sampler:
        """Returns a sampler that makes this one's coming choices if the logits are equal, and leaves it unchanged.

        Both use the same random numbers: a multinomial sample is the argmax of p / e with one exponential e a token,
        and the e are the same. So from two similar distributions both mostly choose the same token.
        """
        if self.greedy:
            return Sampler(True, row_processors.copy_processors(self.processors))
        return Sampler(False, row_processors.copy_processors(self.processors), self.noise.fork_for_draft())

    def gumbel_coupled_logprobs(self, count: int, logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Estimates for some tokens how likely each will be sampled, after ``count`` others, from a draft's numbers.

        The random numbers of that sample are known, so a draft with the target's distribution knows the token.

        Args:
            logprobs: (..., K), the draft's, of its likeliest tokens.
            tokens: (..., K) ids of these.

        Returns:
            (..., K) log-probabilities; the draft's own if the random numbers are not known.
        """
        numbers = self.noise.peek(count) if self.is_noise_known else None
        if numbers is None:
            return logprobs
        scores = logprobs.reshape(-1, logprobs.shape[-1])
        for processor in self.processors:
            if isinstance(processor, _BY_SCORES):
                scores = processor(token_ids.reshape_as(scores), scores)
        return (scores.view_as(logprobs) - numbers[token_ids].clamp_min(_TINY).log()).log_softmax(-1)

    def sample(self, input_ids: torch.Tensor, logits: torch.Tensor) -> int:
        """Decides the token that follows a node.

        Args:
            input_ids: (n,) token ids from the prompt's first to the node.
            logits: (vocabulary,) the target's raw logits at the node.
        """
        if self.greedy:
            return int(self._scores(input_ids, logits).argmax())
        return self.noise.sample(self.probabilities(input_ids, logits))

    def sample_nodes(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor | None:
        """Computes what :meth:`sample` would choose at each of several nodes, without waiting for the device.

        Args:
            logits: (n, vocabulary) of the nodes.
            depths: for each node, the tokens that are sampled before its own.

        Returns:
            (n,) token ids; None if they depend on more than logits and known random numbers. A caller that uses them
            then calls :meth:`SampleNoise.advance`.
        """
        # On a CPU there is nothing to wait for, and processing nodes that are not visited takes longer.
        if logits.device.type == "cpu" or not all(isinstance(p, _BY_SCORES) for p in self.processors):
            return None
        if not self.is_noise_known:
            return None
        numbers = [x for x in map(self.noise.peek, range(max(depths) + 1)) if x is not None]
        scores = logits.float()
        drawn = torch.stack([numbers[depth] for depth in depths])
        for processor in self.processors:
            scores = processor(None, scores)
        return (scores.softmax(-1) / drawn).argmax(-1)

    def probabilities(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """(vocabulary,) the processed probabilities; arguments as of :meth:`sample`."""
        return torch.softmax(self._scores(input_ids, logits), dim=-1)

    def _scores(self, text: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        scores = logits[None].float()
        if len(self.processors):
            scores = self.processors(text[None], scores.clone())
        return scores[0]
