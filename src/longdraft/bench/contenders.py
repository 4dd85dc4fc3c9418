"""Contenders of a benchmark: each decodes the same batch of prompts and reports the time of each part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from longdraft.engine.sampler import Sampling
from longdraft.engine.session import Generation
from longdraft.engine.text_codec import TextCodec
from longdraft.memory.prompt_cache import PromptCache
from longdraft.metrics import TokenCounts, tokens_per_second
from longdraft.model.runner import TargetRunner
from longdraft.native.quantized_matrix import QuantizedMatrix
from longdraft.speculator import Speculator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Job:
    """A batch to decode, the same for every contender.

    Attributes:
        prompts: token ids of each prompt.
        max_tokens: new tokens of each prompt, at most.
        eos_ids: token ids that end a sequence; empty: decode on to ``max_tokens``.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    sampling: Sampling
    seed: int
    eos_ids: frozenset[int]

    def start(self, spec: Speculator, cache: PromptCache | None) -> Generation:
        """Starts the job with a method of longdraft; a cache may hold the prompts' KV, which then is reused."""
        return spec.stream(
            [list(p) for p in self.prompts],
            max_new_tokens=self.max_tokens,
            sampling=self.sampling,
            seed=self.seed,
            eos_token_ids=sorted(self.eos_ids),
            batch=len(self.prompts),
            cache=cache,
        )


@dataclass(frozen=True)
class Run:
    """One decoding of a job.

    Attributes:
        tokens: new tokens of each prompt, EOS included.
        first_token_seconds: from the call to the first token of the last prompt; None in files of old versions.
        decode_seconds: from the first token of the last prompt to the end.
        rounds: target forwards of each prompt after its first token.
        accepted: for each round, how many drafted tokens were accepted, and how many ``max_tokens`` allowed.
        partial_rounds: verification forwards on a part of the target's KV.
        partial_tokens: tokens emitted by partial rounds.
        rolled_back: always 0; in files of old versions, how many of ``partial_tokens`` were rejected later.
        view: description of the KV entries that a draft or a partial verification sees; empty: all.
    """

    tokens: tuple[tuple[int, ...], ...]
    first_token_seconds: float | None
    decode_seconds: float
    rounds: tuple[int, ...]
    accepted: tuple[tuple[int, int], ...] = ()
    partial_rounds: int = 0
    partial_tokens: int = 0
    rolled_back: int = 0
    view: str = ""

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def counts(self) -> list[TokenCounts]:
        """New tokens (without the prefill's) and verification forwards of each prompt."""
        return [(len(tokens) - 1, forwards) for tokens, forwards in zip(self.tokens, self.rounds, strict=False)]

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens a decode second; None if nothing was decoded after the first tokens."""
        return tokens_per_second(self.new_tokens - len(self.tokens), self.decode_seconds)


class Contender(ABC):
    """Decodes jobs: cold, or from the cached KV of the prompts.

    Attributes:
        name: a method with its options (``specpv:budget=512``), or a peer.
        note: a remark for readers of its figures; may be empty.
        draft: folder or file of the draft's weights; None: no draft.
    """

    name: str
    note: str = ""
    draft: Path | None = None

    @abstractmethod
    def is_comparable(self, greedy: bool, batch: int) -> bool:
        """True if, at this batch size, the contender's tokens should equal those of ``ar``."""

    def decode_cold(self, job: Job) -> Run:
        """Drops the cached KV, and decodes with a prefill of its own."""
        self.release()
        return self.decode_warm(job)

    @abstractmethod
    def decode_warm(self, job: Job) -> Run:
        """Decodes a job from the prompts' KV that an earlier run cached; prefills what is not cached."""

    @abstractmethod
    def release(self) -> None:
        """Drops the cached KV of the prompts."""


@dataclass
class SharedPrefill:
    """The cached KV of a job's prompts, shared by longdraft's contenders."""

    cache: PromptCache

    def clear(self) -> None:
        self.cache = PromptCache(self.cache.feature_layers)


class MethodContender(Contender):
    """A method of longdraft as a contender."""

    def __init__(self, name: str, spec: Speculator, prefill: SharedPrefill) -> None:
        runner = spec.runner()
        self.name, self.note = name, f"{weight_formats(runner.model)} weights"
        if runner.arithmetic == "int8":
            self.note += ", int8 arithmetic"
        self.spec, self.prefill = spec, prefill
        draft = spec.draft()
        self.draft = None if draft is None else Path(draft.folder)

    def is_comparable(self, greedy: bool, batch: int) -> bool:
        return self.spec.exact

    def decode_warm(self, job: Job) -> Run:
        generation = job.start(self.spec, self.prefill.cache)
        emitted = [0] * len(job.prompts)
        accepted: list[tuple[int, int]] = []
        for step in generation:
            if step.tree is not None:  # a verification, which emits a bonus token beside the accepted ones
                accepted.append((step.accepted, job.max_tokens - emitted[step.sequence] - 1))
            emitted[step.sequence] += len(step.token_ids)
        results = generation.results()
        return Run(
            tokens=tuple(tuple(r.token_ids) for r in results),
            first_token_seconds=results[0].prefill_seconds,
            decode_seconds=results[0].decode_seconds,
            rounds=tuple(r.rounds for r in results),
            accepted=tuple(accepted),
            partial_rounds=sum(r.partial_rounds for r in results),
            partial_tokens=sum(r.partial_tokens for r in results),
            rolled_back=sum(r.rolled_back for r in results),
            view="; ".join(f"{view.size:,} = {view}" for view in generation.views),
        )

    def release(self) -> None:
        self.prefill.clear()


def eos_ids(runner: TargetRunner, tokenizer: PreTrainedTokenizerBase, ignore_eos: bool) -> frozenset[int]:
    """Token ids that end a sequence: the model's and the tokenizer's."""
    return frozenset() if ignore_eos else runner.eos_token_ids | TextCodec(tokenizer).eos_token_ids


def weight_formats(model: nn.Module) -> str:
    """Dtypes and GGUF types of a model's weights, the most common first: ``float32``, ``Q4_1 and Q8_0``."""
    counts: Counter[str] = Counter()
    seen_pointers: set[int] = set()
    for module in model.modules():
        matrix = getattr(module, "matrix", None)
        params = module.parameters(recurse=False)
        tensors = [(p.data_ptr(), str(p.dtype).removeprefix("torch."), p.numel()) for p in params]
        if isinstance(matrix, QuantizedMatrix):
            tensors.append((matrix.data.data_ptr(), matrix.format, matrix.shape[0] * matrix.shape[1]))
        for pointer, name, size in tensors:
            if pointer not in seen_pointers:  # tied weights count once
                seen_pointers.add(pointer)
                counts[name] += size
    # Norms and biases, under 1 % of the weights, stay in float32: they are not named.
    return " and ".join(name for name, size in counts.most_common() if size > counts.total() / 100)
