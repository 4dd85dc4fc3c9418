"""Contenders of a benchmark: decode the same batch of prompts, and report tokens, times and accepted lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from longdraft.bench.experiment import Tick
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
    from typing_extensions import Self


@dataclass(frozen=True)
class Job:
    """A batch of prompts that every contender decodes."""

    prompts: tuple[tuple[int, ...], ...]  # token ids of each prompt
    max_tokens: int  # new tokens of each prompt, at most
    sampling: Sampling
    seed: int  # of the random numbers
    eos_ids: frozenset[int]  # token ids that end a sequence; empty: decode on to ``max_tokens``
    # called after each prefill chunk but the last, with the number of prompt tokens read, of all prompts together
    on_prefill: Callable[[int], None] = field(default=lambda prefilled: None, compare=False)

    def announced(self, tick: Tick, words: str) -> Self:
        """Calls ``tick`` for a run that is about to start. Returns the job for it, whose prefill moves the bar."""
        tick(words)
        return replace(self, on_prefill=partial(tick, words))

    def start(self, spec: Speculator, cache: PromptCache | None) -> Generation:
        """Starts to decode the job with a method of longdraft. Reuses the KV of the prompts that ``cache`` holds."""
        return spec.stream(
            [list(prompt) for prompt in self.prompts], max_new_tokens=self.max_tokens, sampling=self.sampling,
            seed=self.seed, eos_token_ids=sorted(self.eos_ids), batch=len(self.prompts), cache=cache,
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One decoding of a job."""

    tokens: tuple[tuple[int, ...], ...]  # new tokens of each prompt, EOS included
    # from the start until every prompt has its first token; None in files of old versions
    first_token_seconds: float | None
    decode_seconds: float  # from then to the end
    # for each prompt, the number of verification forwards, which is one a round of drafting and verification
    rounds: tuple[int, ...]
    # for each round, how many drafted tokens were accepted, and how many ``max_tokens`` allowed
    accepted: tuple[tuple[int, int], ...] = ()
    partial_rounds: int = 0  # number of rounds that verified on a part of the target's KV
    partial_tokens: int = 0  # number of tokens that the partial rounds emitted
    view: str = ""  # describes the KV entries that the draft or a partial verification sees; empty: all

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def token_counts(self) -> list[TokenCounts]:
        """For each prompt: number of new tokens without the token of the prefill, number of verification forwards."""
        return [(len(tokens) - 1, forwards) for tokens, forwards in zip(self.tokens, self.rounds, strict=False)]

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per decode second; None if nothing was decoded after the first tokens."""
        return tokens_per_second(self.new_tokens - len(self.tokens), self.decode_seconds)


class Contender(ABC):
    """Decodes jobs, either with a prefill (cold) or from the cached KV of the prompts (warm).

    Attributes:
        name: a method with its options (``specpv:budget=512``), or a peer.
        note: a remark for readers of the contender's figures; may be empty.
        draft: folder or file of the draft's weights; None: no draft.
    """

    name: str
    note: str = ""
    draft: Path | None = None

    @abstractmethod
    def is_comparable(self, greedy: bool, batch: int) -> bool:
        """Returns True if the contender should emit the tokens of ``ar`` in a batch of this size."""

    def decode_cold(self, job: Job) -> Run:
        """Drops the cached KV, then prefills and decodes a job."""
        self.release()
        return self.decode_warm(job)

    @abstractmethod
    def decode_warm(self, job: Job) -> Run:
        """Decodes a job. Starts from the KV of the prompts that earlier runs cached, and prefills the rest."""

    @abstractmethod
    def release(self) -> None:
        """Drops the cached KV of the prompts."""


@dataclass
class SharedPrefill:
    """Holds the cached KV of a job's prompts for all contenders that can use the same KV."""

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
        emitted, prefilled = [0] * len(job.prompts), [0] * len(job.prompts)
        accepted: list[tuple[int, int]] = []
        for step in generation:
            if step.mode == "prefill":
                prefilled[step.sequence] = step.prefilled
                if sum(prefilled) < sum(map(len, job.prompts)):
                    job.on_prefill(sum(prefilled))
            if step.tree is not None:  # a verification; its last token is the bonus token, so 1 less may be accepted
                accepted.append((step.accepted, job.max_tokens - emitted[step.sequence] - 1))
            emitted[step.sequence] += len(step.token_ids)
        results = generation.results()
        return Run(
            tokens=tuple(tuple(result.token_ids) for result in results),
            first_token_seconds=results[0].prefill_seconds, decode_seconds=results[0].decode_seconds,
            rounds=tuple(result.rounds for result in results), accepted=tuple(accepted),
            partial_rounds=sum(result.partial_rounds for result in results),
            partial_tokens=sum(result.partial_tokens for result in results),
            view="; ".join(f"{view.size:,} = {view}" for view in generation.views),
        )  # fmt: skip

    def release(self) -> None:
        self.prefill.clear()


def eos_ids(runner: TargetRunner, tokenizer: PreTrainedTokenizerBase, ignore_eos: bool) -> frozenset[int]:
    """Returns the token ids that end a sequence: those of the model and of the tokenizer."""
    return frozenset() if ignore_eos else runner.eos_token_ids | TextCodec(tokenizer).eos_token_ids


def weight_formats(model: nn.Module) -> str:
    """Names the dtypes or GGUF types of a model's weights, the most common first, such as ``Q4_1 and Q8_0``."""
    counts: Counter[str] = Counter()
    seen_pointers: set[int] = set()
    for module in model.modules():
        matrix = getattr(module, "matrix", None)
        params = module.parameters(recurse=False)
        # (address, name of the dtype or type, number of weights)
        tensors = [(p.data_ptr(), str(p.dtype).removeprefix("torch."), p.numel()) for p in params]
        if isinstance(matrix, QuantizedMatrix):
            tensors.append((matrix.data.data_ptr(), matrix.format, matrix.shape[0] * matrix.shape[1]))
        for pointer, name, num_weights in tensors:
            if pointer not in seen_pointers:  # tied weights count once
                seen_pointers.add(pointer)
                counts[name] += num_weights
    # Types of less than 1 % of the weights are not named: norms and biases stay in float32.
    return " and ".join(name for name, num_weights in counts.most_common() if num_weights > counts.total() / 100)
