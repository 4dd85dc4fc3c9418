"""Contenders of other projects, by name: ``transformers``' own ``generate``, and llama.cpp."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from longdraft.bench.contenders import Contender, Job, Run, weights_of
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine.sampler import RecentPenalty
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.checkpoints import check_gguf, quiet
from longdraft.model.embedded import packaged_file
from longdraft.model.runner import TargetRunner

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


class Generate(Contender):
    """``transformers``' own ``generate``.

    With a draft, it takes one prompt at a time, and cannot start from its KV: every run reads the prompt again, which
    is not in the decode seconds. The forward that reads it verifies a draft too: the tokens it accepts are ``early``.

    Args:
        attention: transformers' name of it.
        drafting: arguments of ``generate`` with which it drafts; empty: plain decoding.

    Attributes:
        same_arithmetic: its model computes in the target's; else its tokens may be others.
    """

    same_arithmetic = True

    def __init__(
        self,
        model: PreTrainedModel,
        name: str = "hf",
        attention: str = "sdpa",
        drafting: Mapping[str, Any] | None = None,
        draft: Path | None = None,
    ) -> None:
        self._model, self.name, self.note, self.draft = model, name, f"{weights_of(model)} weights", draft
        self._attention, self._drafting = attention, drafting or {}
        # Keys and values of the prompts but their last token: views, which the next cache copies when it grows.
        self._prompt_kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    def comparable(self, greedy: bool, batch: int) -> bool:
        # A batch samples all its rows from one generator, ours each from its own; a draft takes further numbers of it.
        return self.same_arithmetic and (greedy or (batch == 1 and not self._drafting))

    def release(self) -> None:
        self._prompt_kv = []

    def warm(self, job: Job) -> Run:
        given = dict(self._drafting)
        if self._prompt_kv:
            given[_CACHE] = cache = DynamicCache()
            for layer, (k, v) in enumerate(self._prompt_kv):
                cache.update(k, v, layer)
        pad, width = min(job.eos, default=0), max(map(len, job.prompts))
        rows = [[pad] * (width - len(p)) + list(p) for p in job.prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in job.prompts]
        torch.manual_seed(job.seed)
        # transformers warns of what it does with an assistant's settings.
        with quiet(), _settings(self._model, _config(job, pad), self._attention):
            clock = TokenTimes()
            out = self._model.generate(
                torch.tensor(rows, device=self._model.device),
                attention_mask=torch.tensor(mask, device=self._model.device),
                streamer=clock,
                return_dict_in_generate=True,
                logits_processor=_window(job),
                **given,
            )
        tokens = tuple(trimmed(row[width:].tolist(), job.eos)[: job.max_tokens] for row in out.sequences)
        if self._drafting:
            return Run.streamed(tokens[0], job, clock.start, clock.times[1:], clock.counts[1:])
        if not self._prompt_kv and width > 1:
            layers = out[_CACHE].layers
            self._prompt_kv = [(x.keys[:, :, : width - 1], x.values[:, :, : width - 1]) for x in layers]
        # One token a forward, and the prompt's forward gives the first.
        first, last = clock.times[1], clock.times[-1]
        return Run(tokens, first - clock.start, last - first, tuple(len(t) - 1 for t in tokens))


def trimmed(tokens: Sequence[int], eos: frozenset[int]) -> tuple[int, ...]:
    """The tokens up to and including the first end of sequence."""
    end = next((i for i, token in enumerate(tokens, 1) if token in eos), None)
    return tuple(tokens[:end])


def _window(job: Job) -> LogitsProcessorList:
    """The penalty that transformers' settings cannot say."""
    penalty, window = job.sampling.repetition_penalty, job.sampling.repetition_window
    return LogitsProcessorList([RecentPenalty(penalty, window)] if penalty and window else [])


def _config(job: Job, pad: int) -> GenerationConfig:
    sampling = job.sampling
    settings: dict[str, Any] = {
        "max_new_tokens": job.max_tokens,
        "eos_token_id": sorted(job.eos) or None,
        "pad_token_id": pad,
        "do_sample": not sampling.greedy,
        "repetition_penalty": 1.0 if sampling.repetition_window else sampling.repetition_penalty or 1.0,
    }
    if not sampling.greedy:
        # Left out, top_k would be transformers' default of 50.
        settings |= {"temperature": sampling.temperature, "min_p": sampling.min_p} | _filters(job)
    return GenerationConfig(**settings)


def _filters(job: Job) -> dict[str, Any]:
    """top_k and top_p as transformers and llama.cpp want them: 0 and 1 filter nothing."""
    return {"top_k": job.sampling.top_k or 0, "top_p": 1.0 if job.sampling.top_p is None else job.sampling.top_p}


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


class LlamaCpp(Contender):
    """llama.cpp's plain decoding, by llama-cpp-python, on as many threads as torch has, or all on the GPU.

    Args:
        file: GGUF; None: that of the embedded model. vocabulary: the target's tokens, whose ids prompts are made of.
        device: the target's.

    Raises:
        CapabilityError: the file has another vocabulary.
        CheckpointError: llama.cpp cannot read it.
    """

    name = "llama-cpp"

    def __init__(self, file: Path | None, vocabulary: int, device: torch.device) -> None:
        self.draft = self._file = file or packaged_file()
        self._device, self._room = device, 0
        self._model = self._opened(512)
        if (own := self._model.n_vocab()) != vocabulary:
            raise CapabilityError(
                f"{self._file} has {own} tokens and the model {vocabulary}: name a GGUF file of the same model "
                "with --gguf."
            )
        weights = _file_type(self._model.metadata.get("general.file_type", ""))
        self.note = (
            f"llama.cpp on {self._file.name}, {weights} weights; it rounds in its own way, so its tokens are others"
        )

    def comparable(self, greedy: bool, batch: int) -> bool:
        return False  # its weights and its arithmetic are rounded

    def release(self) -> None:
        self._model.reset()

    def warm(self, job: Job) -> Run:
        (prompt,) = job.prompts
        needed = len(prompt) + job.max_tokens + 1
        if needed > self._room:
            self._model = self._opened(needed)
        sampling = job.sampling
        self._model.set_seed(job.seed)
        tokens: list[int] = []
        times: list[float] = []
        start = time.perf_counter()
        # It keeps what the prompt shares with the last one.
        for token in self._model.generate(
            list(prompt),
            temp=sampling.temperature,
            min_p=sampling.min_p or 0.0,
            repeat_penalty=sampling.repetition_penalty or 1.0,
            **_filters(job),
        ):
            times.append(time.perf_counter())
            tokens.append(int(token))
            if len(tokens) == job.max_tokens or tokens[-1] in job.eos:
                break
        return Run.streamed(tuple(tokens), job, start, times, [1] * len(tokens))

    def _opened(self, room: int) -> Any:
        """The model, with a cache of ``room`` tokens."""
        from llama_cpp import Llama

        threads, self._room = torch.get_num_threads(), room
        layers = -1 if self._device.type == "cuda" else 0
        try:
            return Llama(
                model_path=str(self._file), n_ctx=room, n_threads=threads, n_threads_batch=threads,
                n_gpu_layers=layers, verbose=False,
            )  # fmt: skip
        except (ValueError, RuntimeError, OSError) as error:
            raise CheckpointError(f"llama.cpp cannot read {self._file} ({error}): give another GGUF file.") from error


def _file_type(number: object) -> str:
    """Precision of a GGUF file's weights by its ``general.file_type``, in GGUF's words: ``Q4_1``."""
    try:
        from gguf import LlamaFileType

        return str(LlamaFileType(int(str(number))).name.removeprefix("MOSTLY_").removeprefix("ALL_"))
    except (ImportError, ValueError):
        return f"GGUF file type {number or 'unknown'}"


@dataclass(frozen=True)
class Sources:
    """Sources of the peers' own weights.

    Attributes:
        assistant: folder or hub id of a model of transformers, or a draft folder.
        gguf: GGUF file; None: that of the embedded model.
    """

    assistant: str | Path | None = None
    gguf: Path | None = None


def _assisted(target: TargetRunner, sources: Sources) -> Generate:
    """``generate`` with a small language model that has the target's vocabulary, at transformers' own settings.

    Raises:
        CapabilityError: none is named, or its head has a part of the vocabulary.
        CheckpointError: it cannot be read, or has another vocabulary.
    """
    draft = None if sources.assistant is None else SmallLMDraft.load(sources.assistant)
    bound = None if draft is None else draft.bound(target)
    if draft is None or bound is None or bound.ids is not None:
        raise CapabilityError(
            "hf-assisted needs a small language model whose head has all of the target's tokens: name one with "
            "--assistant DIR, or leave hf-assisted out."
        )
    return Generate(target.model, ASSISTED, drafting={"assistant_model": bound.runner.model}, draft=draft.folder)


HF, ASSISTED, LLAMA = "hf", "hf-assisted", LlamaCpp.name
PEERS: dict[str, Callable[[TargetRunner, Sources], Contender]] = {
    HF: lambda target, _: Generate(target.model),
    "hf-eager": lambda target, _: Generate(target.model, "hf-eager", "eager"),
    "hf-prompt-lookup": lambda target, _: Generate(
        target.model, "hf-prompt-lookup", drafting={"prompt_lookup_num_tokens": 10}  # as in transformers' documentation
    ),
    ASSISTED: _assisted,
    LLAMA: lambda target, sources: LlamaCpp(sources.gguf, target.vocab_size, target.device),
}  # fmt: skip
"""Makers of each peer by name. All but llama.cpp run on the target's model object, without packed weights."""
BATCHED = (HF, "hf-eager")
"""Peers that take several prompts at once."""


def check(names: Sequence[str], sources: Sources, largest_batch: int) -> None:
    """Refuses peers that cannot run with these settings, before a model is loaded.

    Raises:
        ValueError: a source that none of them reads, or a batch for a peer that takes one prompt at a time.
        CapabilityError: llama-cpp-python is not installed. CheckpointError: no such file, or not a GGUF file.
    """
    for option, given, reader in (("assistant", sources.assistant, ASSISTED), ("gguf", sources.gguf, LLAMA)):
        if given is not None and reader not in names:
            raise ValueError(f"--{option} is for {reader}: add what you want of it to --methods")
    single = [name for name in names if name in PEERS and name not in BATCHED]
    if largest_batch > 1 and single:
        raise ValueError(f"{', '.join(single)} can only decode one prompt at a time: leave out, or give --batch 1")
    if LLAMA in names:
        if importlib.util.find_spec("llama_cpp") is None:
            raise CapabilityError(
                "llama-cpp needs the package llama-cpp-python, which is compiled on the way: pip install "
                "llama-cpp-python, or leave llama-cpp out of --methods."
            )
        check_gguf(sources.gguf or packaged_file())
