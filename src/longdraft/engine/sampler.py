"""The sampler: processes the target's logits, and samples tokens.

The logits processors are those of transformers, so settings mean what they mean in ``generate``. A processor gets the
full context up to a node, so penalties and bans follow the node's path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
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

from longdraft.engine import logits_processors
from longdraft.errors import RequestError
from longdraft.options import declared, option

# (token ids (1, n), scores (1, vocabulary)) -> scores: the interface of transformers' LogitsProcessor.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Processors that ignore the context. So a draft's top k tokens can be processed without the rest of the vocabulary.
_CONTEXT_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
_CONTEXT_FREE_CLASSES = (*_CONTEXT_FREE, logits_processors.FastTopP)
_MIN_NOISE = 1e-30  # replaces noise of 0, whose logarithm is -inf


class SampleNoise:
    """The noise of one sequence's samples: for each sample, an exponential random number e for each vocabulary token.

    A sample of p is the argmax of p / e, or of log p - log e (the Gumbel-max trick). A drafter that knows e of a future
    sample subtracts log e from its logprobs, and mostly predicts the sample (Daliri et al. 2024, arXiv:2408.07978).

    Args:
        generator: draws this sequence's numbers alone; None: torch's global generator, whose future numbers are not
            known, because other code draws from it too.
        is_predictable: whether drafters may read the noise of future samples.
    """

    def __init__(self, generator: torch.Generator | None, is_predictable: bool = True) -> None:
        self._generator, self._is_predictable = generator, is_predictable and generator is not None
        # For each future sample: (the generator's state before the noise was drawn, the noise).
        self._drawn_ahead: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._noise_template: torch.Tensor | None = None  # the last probabilities; noise has their shape and device

    def sample(self, probabilities: torch.Tensor) -> int:
        """Samples a token of the distribution ``probabilities`` (vocabulary,)."""
        self._noise_template = probabilities
        noise = self._drawn_ahead.popleft()[1] if self._drawn_ahead else self._draw(probabilities)
        return int((probabilities / noise).argmax())

    def peek(self, num_before: int) -> torch.Tensor | None:
        """Returns the noise (vocabulary,) of the sample after the next ``num_before`` samples, without using it up;
        None if the noise is not predictable, or nothing has been sampled yet."""
        if not self._is_predictable or self._noise_template is None or self._generator is None:
            return None
        while len(self._drawn_ahead) <= num_before:
            self._drawn_ahead.append((self._generator.get_state(), self._draw(self._noise_template)))
        return self._drawn_ahead[num_before][1]

    def advance(self, num_samples: int) -> None:
        """Uses up the noise of the next ``num_samples`` samples, which the caller drew with noise from :meth:`peek`."""
        for _ in range(num_samples):
            self._drawn_ahead.popleft()

    def restore_generator(self) -> None:
        """Resets the generator as if no noise had been drawn ahead."""
        if self._drawn_ahead and self._generator is not None:
            self._generator.set_state(self._drawn_ahead[0][0])
            self._drawn_ahead.clear()

    def fork_for_draft(self) -> SampleNoise:
        """Returns an independent copy that will draw the same noise; other noise if this noise is not predictable."""
        device = torch.device("cpu") if self._generator is None else self._generator.device
        generator = torch.Generator(device)
        if self._generator is not None and not self._is_predictable:
            other_seed = self._generator.initial_seed() ^ 1
            return SampleNoise(generator.manual_seed(other_seed), is_predictable=False)
        generator.set_state(torch.get_rng_state() if self._generator is None else self._generator.get_state())
        forked = SampleNoise(generator)
        forked._drawn_ahead, forked._noise_template = self._drawn_ahead.copy(), self._noise_template
        return forked

    def _draw(self, template: torch.Tensor) -> torch.Tensor:
        """Draws noise with the shape, dtype and device of ``template``."""
        return torch.empty_like(template).exponential_(1, generator=self._generator)


class WindowedRepetitionPenalty(LogitsProcessor):
    """Applies transformers' repetition penalty to only the last ``window`` tokens (TokenSwift's contextual penalty)."""

    def __init__(self, penalty: float, window: int) -> None:
        self._penalty, self._window = RepetitionPenaltyLogitsProcessor(penalty), window

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        penalized: torch.Tensor = self._penalty(input_ids[:, -self._window :], scores)
        return penalized


@dataclass(frozen=True)
class Sampling:
    """Sampling settings.

    Attributes:
        temperature: divides the logits; 0 is greedy, 1 is the model's own distribution.
        top_k: sample from the k most probable tokens; None or 0: from all.
        top_p: sample from the smallest set of tokens with this total probability, above 0 and at most 1.
        min_p: sample from tokens with at least this fraction of the highest probability, 0 to 1.
        repetition_penalty: above 1 makes tokens of the context less likely, below 1 more likely.
        repetition_window: number of the context's last tokens that the penalty applies to; None: all tokens.
        foresee: whether drafters may read the random numbers of future samples. False makes only the drafts worse.

    Raises:
        RequestError: a value has a wrong type or is out of range.
    """

    temperature: float = option(0.0, min=0)
    top_k: int | None = option(min=0)
    top_p: float | None = option(above=0, most=1)
    min_p: float | None = option(min=0, most=1)
    repetition_penalty: float | None = option(above=0)
    repetition_window: int | None = option(min=1)
    foresee: bool = True

    def __post_init__(self) -> None:
        for name, setting in declared(type(self)).items():
            setting.check(getattr(self, name), RequestError)
        if self.repetition_window is not None and self.repetition_penalty is None:
            raise RequestError("repetition_window needs repetition_penalty: give both")

    @property
    def greedy(self) -> bool:
        """True if decoding takes the most probable token instead of sampling."""
        return self.temperature == 0

    def processors(self, first: Iterable[Processor] = ()) -> LogitsProcessorList:
        """Returns the processors in ``first``, then the processors of these settings, in the order of ``generate``."""
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
    """A logits processor that also reads the prompt's logits. So all of the prompt is computed, and no KV is reused."""

    def prompt_logits(self, start: int, logits: torch.Tensor) -> None:
        """Called with the raw logits (tokens, vocabulary) of a chunk of the prompt that begins at token ``start``."""


@dataclass
class Sampler:
    """Samples one token from the target's logits at a node.

    :meth:`sample` is called once for each emitted token, in order. So a stateful processor gets exactly the calls of
    plain decoding, and a seed gives equal outputs for any draft.

    Attributes:
        greedy: True takes the most probable token instead of sampling.
        processors: the processors that change the logits before a token is chosen.
        noise: the random numbers of the samples; by default from torch's global generator.
    """

    greedy: bool
    processors: LogitsProcessorList
    noise: SampleNoise = field(default_factory=lambda: SampleNoise(None))

    @property
    def prompt_logits_reader(self) -> PromptLogitsReader | None:
        """The first processor that reads the prompt's logits; None if no processor does."""
        return next((p for p in self.processors if isinstance(p, PromptLogitsReader)), None)

    @property
    def is_argmax(self) -> bool:
        """True if the target's token is the argmax of the raw logits: greedy decoding without processors."""
        return self.greedy and len(self.processors) == 0

    @property
    def is_noise_known(self) -> bool:
        """True if tokens are sampled, and :meth:`SampleNoise.peek` returns the noise of future samples."""
        return not self.greedy and self.noise.peek(0) is not None

    @property
    def is_predictable(self) -> bool:
        """True if a sample depends on the logits and on known noise alone: no processor reads the context."""
        return self.is_noise_known and all(isinstance(p, _CONTEXT_FREE) for p in self.processors)

    @property
    def settings_key(self) -> Hashable | None:
        """The types and the values of the processors; None if one may read the context, or is of a user's class."""
        if any(type(p) not in _CONTEXT_FREE_CLASSES for p in self.processors):
            return None
        return tuple((type(p), tuple(sorted(vars(p).items()))) for p in self.processors)

    def fork_for_draft(self) -> Sampler:
        """Returns an independent copy that will draw the same noise: equal tokens for equal logits, and mostly equal
        tokens for similar logits. See :meth:`SampleNoise.fork_for_draft`."""
        if self.greedy:
            return Sampler(True, logits_processors.copy_processors(self.processors))
        return Sampler(False, logits_processors.copy_processors(self.processors), self.noise.fork_for_draft())

    def gumbel_coupled_logprobs(self, num_before: int, logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Adds the noise of a future sample to a draft's top-k logprobs, to predict the sampled token.

        Args:
            num_before: number of samples before the future sample.
            logprobs: (..., k) logprobs of the draft's top k tokens.
            token_ids: (..., k) the top k tokens.

        Returns:
            (..., k) log probability of each token to become the sample; ``logprobs`` if the noise is not known.
        """
        noise = self.noise.peek(num_before) if self.is_noise_known else None
        return logprobs if noise is None else self.couple(logprobs, token_ids, noise)

    def couple(self, logprobs: torch.Tensor, token_ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Does the work of :meth:`gumbel_coupled_logprobs`; ``noise``: (vocabulary,) of the future sample."""
        scores = logprobs.reshape(-1, logprobs.shape[-1])
        for processor in self.processors:
            if isinstance(processor, _CONTEXT_FREE):
                scores = processor(token_ids.reshape_as(scores), scores)
        return (scores.view_as(logprobs) - noise[token_ids].clamp_min(_MIN_NOISE).log()).log_softmax(-1)

    def sample(self, input_ids: torch.Tensor, logits: torch.Tensor) -> int:
        """Returns the token that follows a node.

        Args:
            input_ids: (n,) token ids of the prompt, the output and the path to the node.
            logits: (vocabulary,) the target's raw logits at the node.
        """
        if self.greedy:
            return int(self._scores(input_ids, logits).argmax())
        return self.noise.sample(self.probabilities(input_ids, logits))

    def sample_nodes(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor | None:
        """Computes the result of :meth:`sample` at each of several nodes, without waiting for the device.

        Args:
            logits: (n, vocabulary) the target's raw logits at the nodes.
            depths: depth of each node, which is the number of samples before the sample at the node.

        Returns:
            (n,) token ids; None on a CPU, or if not :attr:`is_predictable`. A caller that emits these tokens must call
            :meth:`SampleNoise.advance`.
        """
        # On a CPU there is no device to wait for, and accept_path samples only the nodes that it visits.
        if logits.device.type == "cpu" or not self.is_predictable:
            return None
        noise_at_depth = [x for x in map(self.noise.peek, range(max(depths) + 1)) if x is not None]
        return self.sample_with(logits, torch.stack([noise_at_depth[depth] for depth in depths]))

    def sample_with(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Returns the samples (n,) of n nodes, whose logits and noise are (n, vocabulary). No processor may read the
        context."""
        scores = logits.float()
        for processor in self.processors:
            scores = processor(None, scores)
        return (scores.softmax(-1) / noise).argmax(-1)

    def probabilities(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Returns the processed distribution (vocabulary,); the arguments are those of :meth:`sample`."""
        return torch.softmax(self._scores(input_ids, logits), dim=-1)

    def _scores(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        scores = logits[None].float()
        if len(self.processors):
            scores = self.processors(input_ids[None], scores.clone())
        return scores[0]
