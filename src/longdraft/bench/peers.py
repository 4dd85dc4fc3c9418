"""Peers, which are contenders from outside of longdraft: ``generate`` of transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from longdraft.bench.contenders import Contender, Job, Run, weight_formats
from longdraft.engine.sampler import WindowedRepetitionPenalty
from longdraft.model.load.checkpoints import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Name of the KV cache in a forward's arguments and output, which transformers 5.24 renamed.
_CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
HF = "hf"
PEERS = {HF: "sdpa", "hf-eager": "eager"}
"""By the name of each peer: the ``attn_implementation`` with which transformers decodes. Prompts are read with sdpa:
eager attention keeps a score of each pair of tokens, 34 GB a layer of 32 heads for 16K tokens."""


class TimingStreamer(BaseStreamer):
    """Records when ``generate`` emits tokens. ``generate`` puts the prompt first, then the tokens of each forward."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class TransformersGenerate(Contender):
    """Decodes jobs with ``generate`` of transformers, one token a forward. ``same_arithmetic``: ``model`` and
    longdraft's target compute in the same arithmetic. Otherwise tokens may differ."""

    def __init__(self, model: PreTrainedModel, name: str = HF, same_arithmetic: bool = True) -> None:
        self._model, self.name, self.note = model, name, f"{weight_formats(model)} weights"
        self._same_arithmetic = same_arithmetic
        # K and V of each layer, for all prompt tokens but the last, which every run computes again. Runs copy K and V.
        self._prompt_kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    def is_comparable(self, greedy: bool, batch: int) -> bool:
        return self._same_arithmetic and (greedy or batch == 1)  # a batch shares one random generator

    def release(self) -> None:
        self._prompt_kv = []

    def decode_warm(self, job: Job) -> Run:
        prefill_seconds = 0.0
        if not self._prompt_kv and PEERS[self.name] != PEERS[HF]:  # this run reads the prompt with sdpa first
            start = time.perf_counter()
            self._generate(replace(job, max_tokens=1), PEERS[HF])
            prefill_seconds = time.perf_counter() - start
        tokens, streamer = self._generate(job, PEERS[self.name])
        # times[0]: the prompt; times[1]: the token of the prefill; then one token of each prompt a forward.
        first, last = streamer.times[1], streamer.times[-1]
        rounds = tuple(len(token_ids) - 1 for token_ids in tokens)
        return Run(tokens, prefill_seconds + first - streamer.start, decode_seconds=last - first, rounds=rounds)

    def _generate(self, job: Job, attention: str) -> tuple[tuple[tuple[int, ...], ...], TimingStreamer]:
        """Decodes a job from the cached KV, or from its prompts, whose KV is cached then."""
        cache_kwargs: dict[str, Any] = {}
        if self._prompt_kv:
            cache_kwargs[_CACHE_FIELD] = cache = DynamicCache()
            for layer, (k, v) in enumerate(self._prompt_kv):
                cache.update(k, v, layer)
        pad_id, width = min(job.eos_ids, default=0), max(map(len, job.prompts))
        input_ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in job.prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in job.prompts]
        torch.manual_seed(job.seed)
        with quiet(), _temporary_settings(self._model, _generation_config(job, pad_id), attention):
            streamer = TimingStreamer()
            out = self._model.generate(
                torch.tensor(input_ids, device=self._model.device),
                attention_mask=torch.tensor(mask, device=self._model.device),
                streamer=streamer, logits_processor=_extra_processors(job), return_dict_in_generate=True,
                **cache_kwargs,
            )  # fmt: skip
        outputs = [token_ids[width:].tolist() for token_ids in out.sequences]
        if not self._prompt_kv and width > 1:
            layers = out[_CACHE_FIELD].layers
            self._prompt_kv = [(layer.keys[:, :, : width - 1], layer.values[:, :, : width - 1]) for layer in layers]
        return tuple(trim_at_eos(token_ids, job.eos_ids)[: job.max_tokens] for token_ids in outputs), streamer


def trim_at_eos(tokens: Sequence[int], eos_ids: frozenset[int]) -> tuple[int, ...]:
    """Returns the tokens up to and with the first EOS."""
    end = next((i for i, token in enumerate(tokens, 1) if token in eos_ids), None)
    return tuple(tokens[:end])


def _extra_processors(job: Job) -> LogitsProcessorList:
    """Makes the job's windowed repetition penalty, which ``GenerationConfig`` cannot express."""
    penalty, window = job.sampling.repetition_penalty, job.sampling.repetition_window
    return LogitsProcessorList([WindowedRepetitionPenalty(penalty, window)] if penalty and window else [])


def _generation_config(job: Job, pad_id: int) -> GenerationConfig:
    sampling = job.sampling
    settings: dict[str, Any] = {
        "max_new_tokens": job.max_tokens,
        "eos_token_id": sorted(job.eos_ids) or None,
        "pad_token_id": pad_id,
        "do_sample": not sampling.greedy,
        "repetition_penalty": 1.0 if sampling.repetition_window else sampling.repetition_penalty or 1.0,
    }
    if not sampling.greedy:
        # top_k = 0: no limit. Without the argument transformers would use 50.
        top_p = 1.0 if sampling.top_p is None else sampling.top_p
        settings |= {
            "temperature": sampling.temperature, "min_p": sampling.min_p, "top_k": sampling.top_k or 0, "top_p": top_p
        }  # fmt: skip
    return GenerationConfig(**settings)


@contextmanager
def _temporary_settings(model: PreTrainedModel, config: GenerationConfig, attention: str) -> Iterator[None]:
    """Sets the model's attention and generation configuration inside the context.

    An argument of ``generate`` is not enough: ``generate`` replaces None, such as no EOS, by the model's value.
    """
    previous_config, previous_attention = model.generation_config, model.config._attn_implementation
    model.generation_config = config
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.generation_config = previous_config
        model.set_attn_implementation(previous_attention)
