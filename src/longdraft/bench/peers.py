"""What this package is measured against. The only file outside ``target/`` and its like that uses transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from longdraft.bench.contenders import Contender, Job, Run, trimmed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Clock(BaseStreamer):
    """A streamer that only looks at the clock. ``generate`` gives it the prompt first, then each token."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def first_token_seconds(self) -> float:
        return self.times[1] - self.start

    @property
    def decode_seconds(self) -> float:
        return self.times[-1] - self.times[1]


class Generate:
    """``transformers``' own ``generate`` with sdpa attention, on the same model object."""

    name = "hf"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Keys and values of the prompts but their last token: views, which the next cache copies when it grows.
        self._prompt_kv: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def cold(self, job: Job) -> Run:
        self.release()
        return self._run(job)

    def warm(self, job: Job) -> Run:
        return self._run(job)

    def release(self) -> None:
        self._prompt_kv = None

    def _run(self, job: Job) -> Run:
        pad = min(job.eos, default=0)
        width = max(map(len, job.prompts))
        rows = [[pad] * (width - len(p)) + list(p) for p in job.prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in job.prompts]
        device = self._model.device
        known: dict[str, Any] = {}
        if self._prompt_kv is not None:
            known["past_key_values"] = cache = DynamicCache()
            for layer, (k, v) in enumerate(self._prompt_kv):
                cache.update(k, v, layer)
        torch.manual_seed(job.seed)
        with _sdpa(self._model), _settings(self._model, _config(job, pad)):
            clock = Clock()
            out = self._model.generate(
                torch.tensor(rows, device=device),
                attention_mask=torch.tensor(mask, device=device),
                streamer=clock,
                return_dict_in_generate=True,
                **known,
            )
        if self._prompt_kv is None and width > 1:
            layers = out.past_key_values.layers
            self._prompt_kv = [(x.keys[:, :, : width - 1], x.values[:, :, : width - 1]) for x in layers]
        tokens = tuple(trimmed(row[width:].tolist(), job.eos) for row in out.sequences)
        # One token a forward, and the prompt's forward gives the first.
        rounds = tuple(len(t) - 1 for t in tokens)
        return Run(tokens, clock.first_token_seconds, clock.decode_seconds, rounds)


def _config(job: Job, pad: int) -> GenerationConfig:
    sampling = job.sampling
    settings: dict[str, Any] = {
        "max_new_tokens": job.max_tokens,
        "eos_token_id": sorted(job.eos) or None,
        "pad_token_id": pad,
        "do_sample": not sampling.greedy,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
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
def _settings(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Puts ``config`` in place of the model's own for a while: ``generate`` fills what an argument leaves out, such
    as an EOS that is to be ignored, from the model's."""
    before = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def _sdpa(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    if before != "sdpa":
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if before != "sdpa":
            model.set_attn_implementation(before)


PEERS: dict[str, type[Generate]] = {Generate.name: Generate}


def peer(name: str, model: PreTrainedModel) -> Contender:
    """The peer of that name, on a model."""
    return PEERS[name](model)
