"""The sampler: processes the target's distribution and samples tokens of it.

The processors are those of transformers, so settings mean what they mean in ``generate``. They see the full context up
to a node, so penalties and bans apply along the node's own path.
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

from longdraft.engine import logits_processors as logits_processors
from longdraft.errors import RequestError
from longdraft.options import check_number, whole_number

# Takes token ids (1, n) and scores (1, vocabulary), returns scores: transformers' LogitsProcessor interface.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Processors that ignore the context. They can be applied to the top k alone, with nearly the same result.
_CONTEXT_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
_TINY = 1e-30  # replaces noise of 0, which has no logarithm


class SampleNoise:
    """The random numbers of one sequence's samples: one exponential e for each token of the vocabulary.

    A sample of p is the argmax of p / e, or of log p - log e (the Gumbel-max trick). A drafter that subtracts the log e
    of future samples from its own logprobs mostly finds the tokens that will be sampled (Daliri et al. 2024,
    arXiv:2408.07978).

    Args:
        generator: used by nothing else in the meantime; None: torch's global one, whose future numbers are never known.
        is_predictable: drafters may see the noise of future samples.
    """

    def __init__(self, generator: torch.Generator | None, is_predictable: bool = True) -> None:
        self._generator, self._is_predictable = generator, is_predictable and generator is not None
        # (generator state before, noise) of future samples.
        self._drawn_ahead: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._last_probabilities: torch.Tensor | None = None

    def sample(self, probabilities: torch.Tensor) -> int:
        """Samples a token of the distribution ``probabilities`` (vocabulary,)."""
        self._last_probabilities = probabilities
        noise = self._drawn_ahead.popleft()[1] if self._drawn_ahead else self._draw(probabilities)
        return int((probabilities / noise).argmax())

    def peek(self, count: int) -> torch.Tensor | None:
        """Returns the noise (vocabulary,) of the sample after ``count`` others; None if it is not known."""
        if not self._is_predictable or self._last_probabilities is None or self._generator is None:
            return None
        while len(self._drawn_ahead) <= count:
            self._drawn_ahead.append((self._generator.get_state(), self._draw(self._last_probabilities)))
        return self._drawn_ahead[count][1]

    def advance(self, count: int) -> None:
        """Skips the noise of ``count`` samples, which were chosen with noise from :meth:`peek`."""
        for _ in range(count):
            self._drawn_ahead.popleft()

    def restore_generator(self) -> None:
        """Resets the generator as if no noise had been drawn ahead."""
        if self._drawn_ahead and self._generator is not None:
            self._generator.set_state(self._drawn_ahead[0][0])
            self._drawn_ahead.clear()

    def fork_for_draft(self) -> SampleNoise:
        """Returns a copy with the same future noise, which is not used up here; with other noise if not predictable."""
        device = torch.device("cpu") if self._generator is None else self._generator.device
        generator = torch.Generator(device)
        if self._generator is not None and not self._is_predictable:
            return SampleNoise(generator.manual_seed(self._generator.initial_seed() ^ 1), is_predictable=False)
        generator.set_state(torch.get_rng_state() if self._generator is None else self._generator.get_state())
        forked = SampleNoise(generator)
        forked._drawn_ahead, forked._last_probabilities = self._drawn_ahead.copy(), self._last_probabilities
        return forked

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like).exponential_(1, generator=self._generator)


class WindowedRepetitionPenalty(LogitsProcessor):
    """transformers' repetition penalty on the last ``window`` tokens alone (TokenSwift's contextual penalty)."""

    def __init__(self, penalty: float, window: int) -> None:
        self._penalty, self._window = RepetitionPenaltyLogitsProcessor(penalty), window

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        penalized: torch.Tensor = self._penalty(input_ids[:, -self._window :], scores)
        return penalized


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "at least 0"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda x: x > 0, "above 0"),
}


@dataclass(frozen=True)
class Sampling:
    """Sampling settings.

    Attributes:
        temperature: 0 is greedy; 1 is the model's own distribution.
        top_k: sample from the k most probable tokens; None or 0: from all.
        top_p: sample from the smallest set of tokens with this total probability, above 0 and at most 1.
        min_p: sample from tokens with at least this fraction of the highest probability, 0 to 1.
        repetition_penalty: above 1 makes tokens of the context less likely, below 1 more likely.
        repetition_window: last tokens of the context that the penalty applies to; None: all.
        foresee: drafters see the random numbers of future samples. Without, drafts are worse, the output is the same.

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
        for name, (is_valid, allowed) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name == "temperature":
                check_number(name, value)
                if not is_valid(value):
                    raise RequestError(f"{name} must be {allowed}, got {value}")
        for name, minimum in (("top_k", 0), ("repetition_window", 1)):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), minimum)
        if self.repetition_window is not None and self.repetition_penalty is None:
            raise RequestError("repetition_window needs repetition_penalty: give that too")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def processors(self, first: Iterable[Processor] = ()) -> LogitsProcessorList:
        """Returns the processors in the order of ``generate``, behind the processors ``first``."""
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
            processors.append(logits_processors.FastTopP(float(self.top_p)))
        if self.min_p:
            processors.append(MinPLogitsWarper(float(self.min_p)))
        return processors


@runtime_checkable
class PromptLogitsReader(Protocol):
    """A logits processor that also gets the prompt's logits. The whole prompt is then read, without a cached prefix."""

    def prompt_logits(self, start: int, logits: torch.Tensor) -> None:
        """Takes the unprocessed logits (tokens, vocabulary) of the prompt's tokens from ``start`` on."""


@dataclass
class Sampler:
    """Samples one token from the target's logits at a node.

    It is called once for each emitted token, in order. So a stateful processor sees exactly the calls of plain
    decoding, and a seed gives the same output for any draft.

    Attributes:
        greedy: take the most probable token instead of sampling.
        processors: applied to the logits first.
        noise: the random numbers; by default from torch's global generator.
    """

    greedy: bool
    processors: LogitsProcessorList
    noise: SampleNoise = field(default_factory=lambda: SampleNoise(None))

    @property
    def prompt_logits_reader(self) -> PromptLogitsReader | None:
        """The first processor that needs the prompt's logits."""
        return next((p for p in self.processors if isinstance(p, PromptLogitsReader)), None)

    @property
    def is_argmax(self) -> bool:
        """True if the token of a node is the argmax of its logits, for any path."""
        return self.greedy and len(self.processors) == 0

    @property
    def is_noise_known(self) -> bool:
        """True if the noise of future samples is known."""
        return not self.greedy and self.noise.peek(0) is not None

    def fork_for_draft(self) -> Sampler:
        """Returns a sampler with the same future noise; this one is unchanged.

        From equal logits both sample the same tokens, from similar ones mostly the same.
        """
        if self.greedy:
            return Sampler(True, logits_processors.copy_processors(self.processors))
        return Sampler(False, logits_processors.copy_processors(self.processors), self.noise.fork_for_draft())

    def gumbel_coupled_logprobs(self, count: int, logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Adds the noise of a future sample to a draft's top-k logprobs, to predict the sampled token.

        Args:
            count: samples before that one.
            logprobs: (..., K), the draft's.
            token_ids: (..., K).

        Returns:
            (..., K) logprobs that each token will be sampled; those of the draft if the noise is not known.
        """
        noise = self.noise.peek(count) if self.is_noise_known else None
        if noise is None:
            return logprobs
        scores = logprobs.reshape(-1, logprobs.shape[-1])
        for processor in self.processors:
            if isinstance(processor, _CONTEXT_FREE):
                scores = processor(token_ids.reshape_as(scores), scores)
        return (scores.view_as(logprobs) - noise[token_ids].clamp_min(_TINY).log()).log_softmax(-1)

    def sample(self, input_ids: torch.Tensor, logits: torch.Tensor) -> int:
        """Returns the token that follows a node.

        Args:
            input_ids: (n,) prompt and path, up to the node.
            logits: (vocabulary,) the target's raw logits at the node.
        """
        if self.greedy:
            return int(self._scores(input_ids, logits).argmax())
        return self.noise.sample(self.probabilities(input_ids, logits))

    def sample_nodes(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor | None:
        """Computes the result of :meth:`sample` at each of several nodes, without waiting for the device.

        Args:
            logits: (n, vocabulary) of the nodes.
            depths: for each node, the number of samples before its own.

        Returns:
            (n,) token ids; None if they depend on more than logits and known noise. A caller that uses them then calls
            :meth:`SampleNoise.advance`.
        """
        # On a CPU there is no device to wait for, and processing unvisited nodes costs time.
        if logits.device.type == "cpu" or not all(isinstance(p, _CONTEXT_FREE) for p in self.processors):
            return None
        if not self.is_noise_known:
            return None
        noise = [x for x in map(self.noise.peek, range(max(depths) + 1)) if x is not None]
        scores = logits.float()
        node_noise = torch.stack([noise[depth] for depth in depths])
        for processor in self.processors:
            scores = processor(None, scores)
        return (scores.softmax(-1) / node_noise).argmax(-1)

    def probabilities(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Returns the processed distribution (vocabulary,). Arguments as in :meth:`sample`."""
        return torch.softmax(self._scores(input_ids, logits), dim=-1)

    def _scores(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        scores = logits[None].float()
        if len(self.processors):
            scores = self.processors(input_ids[None], scores.clone())
        return scores[0]
