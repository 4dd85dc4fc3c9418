"""``transformers``' own ``generate`` as a contender. The only file outside ``host/`` and its like that uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from longdraft.bench import precision
from longdraft.bench.contenders import Job, Run, trimmed
from longdraft.engine.sampler import RecentPenalty
from longdraft.model.checkpoints import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The name of the cache in a forward's keywords and output; transformers 5.24 changed it.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"


class TokenTimes(BaseStreamer):
    """A streamer that notes the time. ``generate`` gives it the prompt first, then each forward's tokens.

    Attributes:
        times, counts: time of each call, and its tokens in all rows together; the prompt's is the first.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class Generate:
    """``transformers``' own ``generate`` with sdpa attention.

    Attributes:
        attention: transformers' name of it.
        same_arithmetic: its model computes in the target's; else its tokens may be others.
    """

    name = "hf"
    attention = "sdpa"
    draft: Path | None = None
    same_arithmetic = True

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.note = model, f"{precision.of_model(model)} weights"
        # Keys and values of the prompts but their last token: views, which the next cache copies when it grows.
        self._prompt_kv: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def comparable(self, greedy: bool, batch: int) -> bool:
        # A batch samples all its rows from one generator, ours each from its own: no row agrees.
        return self.same_arithmetic and (greedy or batch == 1)

    def cold(self, job: Job) -> Run:
        self.release()
        return self._run(job)

    def warm(self, job: Job) -> Run:
        return self._run(job)

    def release(self) -> None:
        self._prompt_kv = None

    def _run(self, job: Job) -> Run:
        arguments: dict[str, Any] = {}
        if self._prompt_kv is not None:
            arguments[_CACHE] = cache = DynamicCache()
            for layer, (k, v) in enumerate(self._prompt_kv):
                cache.update(k, v, layer)
        out, width, clock = self._generate(job, arguments)
        if self._prompt_kv is None and width > 1:
            layers = out[_CACHE].layers
            self._prompt_kv = [(x.keys[:, :, : width - 1], x.values[:, :, : width - 1]) for x in layers]
        tokens = _new_tokens(out, width, job)
        # One token a forward, and the prompt's forward gives the first.
        rounds = tuple(len(t) - 1 for t in tokens)
        first, last = clock.times[1], clock.times[-1]
        return Run(tokens, first - clock.start, last - first, rounds)

    def _generate(self, job: Job, arguments: Mapping[str, Any], **settings: Any) -> tuple[Any, int, TokenTimes]:
        """``generate``'s output, the prompts' padded width, and the times of its tokens.

        Args:
            arguments: further ones of ``generate``. settings: further ones of its configuration.
        """
        pad = min(job.eos, default=0)
        width = max(map(len, job.prompts))
        rows = [[pad] * (width - len(p)) + list(p) for p in job.prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in job.prompts]
        device = self._model.device
        torch.manual_seed(job.seed)
        with ExitStack() as changed:
            changed.enter_context(quiet())  # transformers warns of what it does with an assistant's settings
            changed.enter_context(_settings(self._model, _config(job, pad, settings), self.attention))
            clock = TokenTimes()
            out = self._model.generate(
                torch.tensor(rows, device=device),
                attention_mask=torch.tensor(mask, device=device),
                streamer=clock,
                return_dict_in_generate=True,
                logits_processor=_window(job),
                **arguments,
            )
        return out, width, clock


class Eager(Generate):
    """``generate`` with plain matrix products for attention ("Vanilla HF" of LongSpec's table 3)."""

    name = "hf-eager"
    attention = "eager"


class Assisted(Generate):
    """``generate`` with a draft of several tokens that one forward verifies. It takes one prompt at a time.

    It cannot start from a prompt's KV, so every run reads the prompt again, which is not in the decode seconds. The
    forward that reads the prompt verifies a draft too: the tokens that it accepts are ``early``.
    """

    arguments: Mapping[str, Any] = {}  # of generate, beside those of plain decoding
    configuration: Mapping[str, Any] = {}

    def comparable(self, greedy: bool, batch: int) -> bool:
        # Sampled tokens have the right distribution, but not our random numbers.
        return self.same_arithmetic and greedy

    def _run(self, job: Job) -> Run:
        out, width, clock = self._generate(job, self.arguments, **self.configuration)
        (tokens,) = _new_tokens(out, width, job)
        return Run.streamed(tokens, job, clock.start, clock.times[1:], clock.counts[1:])


class PromptLookup(Assisted):
    """``generate``'s own prompt lookup."""

    name = "hf-prompt-lookup"
    configuration: Mapping[str, Any] = {"prompt_lookup_num_tokens": 10}  # as in transformers' documentation


class AssistantModel(Assisted):
    """``generate`` with a small language model as its assistant, at transformers' own settings.

    Args:
        assistant: with the model's vocabulary, on its device. folder: where it was read from.
    """

    name = "hf-assisted"

    def __init__(self, model: PreTrainedModel, assistant: PreTrainedModel, folder: Path) -> None:
        super().__init__(model)
        self.draft, self.arguments = folder, {"assistant_model": assistant}


def _new_tokens(out: Any, width: int, job: Job) -> tuple[tuple[int, ...], ...]:
    return tuple(trimmed(row[width:].tolist(), job.eos)[: job.max_tokens] for row in out.sequences)


def _window(job: Job) -> LogitsProcessorList:
    """The penalty that transformers' settings cannot say."""
    penalty, window = job.sampling.repetition_penalty, job.sampling.repetition_window
    return LogitsProcessorList([RecentPenalty(penalty, window)] if penalty and window else [])


def _config(job: Job, pad: int, more: Mapping[str, Any]) -> GenerationConfig:
    sampling = job.sampling
    settings: dict[str, Any] = {
        **more,
        "max_new_tokens": job.max_tokens,
        "eos_token_id": sorted(job.eos) or None,
        "pad_token_id": pad,
        "do_sample": not sampling.greedy,
        "repetition_penalty": 1.0 if sampling.repetition_window else sampling.repetition_penalty or 1.0,
    }
    if not sampling.greedy:
        # Left out, top_k would be transformers' default of 50.
        settings |= {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p if sampling.top_p is not None else 1.0,
            "min_p": sampling.min_p,
        }
    return GenerationConfig(**settings)


@contextmanager
def _settings(model: PreTrainedModel, config: GenerationConfig, attention: str) -> Iterator[None]:
    """Gives the model this attention and this configuration for a while.

    ``generate`` takes what a configuration leaves out, such as an EOS that is to be ignored, from the model's own.
    """
    before, own = model.generation_config, model.config._attn_implementation
    model.generation_config = config
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.generation_config = before
        model.set_attn_implementation(own)
