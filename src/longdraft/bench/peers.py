"""Contenders of another project: ``transformers``' own ``generate``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from longdraft.bench.contenders import Contender, Job, Run, weight_formats
from longdraft.engine.sampler import WindowedRepetitionPenalty
from longdraft.model.checkpoints import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The name of the cache in a forward's keywords and output; transformers 5.24 changed it.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
HF = "hf"
PEERS = {HF: "sdpa", "hf-eager": "eager"}
"""transformers' name of the attention of each peer, by the peer's name."""


class TimingStreamer(BaseStreamer):
    """A streamer that notes the time: ``generate`` gives it the prompt first, then each forward's tokens."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class TransformersGenerate(Contender):
    """``transformers``' own ``generate``, with plain decoding.

    Args:
        name: one of :data:`PEERS`.
        same_arithmetic: its model computes in the target's; else its tokens may be others.
    """

    def __init__(self, model: PreTrainedModel, name: str = HF, same_arithmetic: bool = True) -> None:
        self._model, self.name, self.note = model, name, f"{weight_formats(model)} weights"
        self._same_arithmetic = same_arithmetic
        # Keys and values of the prompts but their last token: views, which the next cache copies when it grows.
        self._prompt_kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    def is_comparable(self, greedy: bool, batch: int) -> bool:
        return self._same_arithmetic and (greedy or batch == 1)  # its batch samples all rows from one generator

    def release(self) -> None:
        self._prompt_kv = []

    def decode_warm(self, job: Job) -> Run:
        given: dict[str, Any] = {}
        if self._prompt_kv:
            given[_CACHE] = cache = DynamicCache()
            for layer, (k, v) in enumerate(self._prompt_kv):
                cache.update(k, v, layer)
        pad, width = min(job.eos_ids, default=0), max(map(len, job.prompts))
        rows = [[pad] * (width - len(p)) + list(p) for p in job.prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in job.prompts]
        torch.manual_seed(job.seed)
        with quiet(), _settings(self._model, _config(job, pad), PEERS[self.name]):
            clock = TimingStreamer()
            out = self._model.generate(
                torch.tensor(rows, device=self._model.device),
                attention_mask=torch.tensor(mask, device=self._model.device),
                streamer=clock,
                return_dict_in_generate=True,
                logits_processor=_window(job),
                **given,
            )
        tokens = tuple(trim_at_eos(row[width:].tolist(), job.eos_ids)[: job.max_tokens] for row in out.sequences)
        if not self._prompt_kv and width > 1:
            layers = out[_CACHE].layers
            self._prompt_kv = [(x.keys[:, :, : width - 1], x.values[:, :, : width - 1]) for x in layers]
        # One token a forward, and the prompt's forward gives the first.
        first, last = clock.times[1], clock.times[-1]
        return Run(tokens, first - clock.start, last - first, tuple(len(t) - 1 for t in tokens))


def trim_at_eos(tokens: Sequence[int], eos: frozenset[int]) -> tuple[int, ...]:
    """The tokens up to and including the first end of sequence."""
    end = next((i for i, token in enumerate(tokens, 1) if token in eos), None)
    return tuple(tokens[:end])


def _window(job: Job) -> LogitsProcessorList:
    """The penalty that transformers' settings cannot say."""
    penalty, window = job.sampling.repetition_penalty, job.sampling.repetition_window
    return LogitsProcessorList([WindowedRepetitionPenalty(penalty, window)] if penalty and window else [])


def _config(job: Job, pad: int) -> GenerationConfig:
    sampling = job.sampling
    settings: dict[str, Any] = {
        "max_new_tokens": job.max_tokens,
        "eos_token_id": sorted(job.eos_ids) or None,
        "pad_token_id": pad,
        "do_sample": not sampling.greedy,
        "repetition_penalty": 1.0 if sampling.repetition_window else sampling.repetition_penalty or 1.0,
    }
    if not sampling.greedy:
        # Left out, top_k would be transformers' default of 50.
        top_p = 1.0 if sampling.top_p is None else sampling.top_p
        settings |= {
            "temperature": sampling.temperature, "min_p": sampling.min_p, "top_k": sampling.top_k or 0, "top_p": top_p
        }  # fmt: skip
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
