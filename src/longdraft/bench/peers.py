"""Contenders to compare with: ``transformers``' own ``generate``."""

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

# Name of the KV cache in a forward's arguments and output, which transformers 5.24 renamed.
_CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
HF = "hf"
PEERS = {HF: "sdpa", "hf-eager": "eager"}
"""Names of the peers, and ``attn_implementation`` of each."""


class TimingStreamer(BaseStreamer):
    """A streamer that records times: ``generate`` passes it the prompt first, then the tokens of each forward."""

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
        same_arithmetic: the model computes in longdraft's arithmetic; if False, tokens may differ.
    """

    def __init__(self, model: PreTrainedModel, name: str = HF, same_arithmetic: bool = True) -> None:
        self._model, self.name, self.note = model, name, f"{weight_formats(model)} weights"
        self._same_arithmetic = same_arithmetic
        # K and V of each layer, without the last prompt token: every run computes that again. Runs copy them.
        self._prompt_kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    def is_comparable(self, greedy: bool, batch: int) -> bool:
        return self._same_arithmetic and (greedy or batch == 1)  # a batch shares one random generator

    def release(self) -> None:
        self._prompt_kv = []

    def decode_warm(self, job: Job) -> Run:
        cached: dict[str, Any] = {}
        if self._prompt_kv:
            cached[_CACHE_FIELD] = cache = DynamicCache()
            for layer, (k, v) in enumerate(self._prompt_kv):
                cache.update(k, v, layer)
        pad, width = min(job.eos_ids, default=0), max(map(len, job.prompts))
        input_ids = [[pad] * (width - len(p)) + list(p) for p in job.prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in job.prompts]
        torch.manual_seed(job.seed)
        with quiet(), _temporary_settings(self._model, _config(job, pad), PEERS[self.name]):
            streamer = TimingStreamer()
            out = self._model.generate(
                torch.tensor(input_ids, device=self._model.device),
                attention_mask=torch.tensor(mask, device=self._model.device),
                streamer=streamer,
                return_dict_in_generate=True,
                logits_processor=_extra_processors(job),
                **cached,
            )
        tokens = tuple(trim_at_eos(row[width:].tolist(), job.eos_ids)[: job.max_tokens] for row in out.sequences)
        if not self._prompt_kv and width > 1:
            layers = out[_CACHE_FIELD].layers
            self._prompt_kv = [(x.keys[:, :, : width - 1], x.values[:, :, : width - 1]) for x in layers]
        # times[0]: the prompt; times[1]: the prefill's token; then one token a forward.
        first, last = streamer.times[1], streamer.times[-1]
        return Run(tokens, first - streamer.start, last - first, tuple(len(t) - 1 for t in tokens))


def trim_at_eos(tokens: Sequence[int], eos: frozenset[int]) -> tuple[int, ...]:
    """The tokens up to the first EOS, which is included."""
    end = next((i for i, token in enumerate(tokens, 1) if token in eos), None)
    return tuple(tokens[:end])


def _extra_processors(job: Job) -> LogitsProcessorList:
    """The windowed repetition penalty if the job has one, as ``GenerationConfig`` has none."""
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
        # top_k = 0 switches off the default of transformers, 50.
        top_p = 1.0 if sampling.top_p is None else sampling.top_p
        settings |= {
            "temperature": sampling.temperature, "min_p": sampling.min_p, "top_k": sampling.top_k or 0, "top_p": top_p
        }  # fmt: skip
    return GenerationConfig(**settings)


@contextmanager
def _temporary_settings(model: PreTrainedModel, config: GenerationConfig, attention: str) -> Iterator[None]:
    """Sets the model's attention and generation configuration inside the context.

    An argument of ``generate`` is not enough: it fills None, such as no EOS, from the model's configuration.
    """
    previous_config, previous_attention = model.generation_config, model.config._attn_implementation
    model.generation_config = config
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.generation_config = previous_config
        model.set_attn_implementation(previous_attention)
