"""Measures contenders on a batch of prompts.

First every contender decodes the batch cold, with its own prefill. The cold run warms the contender up, and gives its
time to first token. The timed runs follow, all contenders in turn, each from the cached KV of the prompts. Peak memory
is read after each run. Without ``cold``, the prefill of ``ar`` serves all methods, and a turn of a conversation
continues the KV of the turn before.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from longdraft.bench import scores
from longdraft.bench.contenders import Contender, Job, MethodContender, Run, SharedPrefill, eos_ids
from longdraft.bench.experiment import Step, Tick, interleave, no_bar
from longdraft.bench.peers import PEERS, TransformersGenerate
from longdraft.bench.profile import profile_job
from longdraft.bench.prompts import Prompt, PromptBatch
from longdraft.bench.settings import REFERENCE, Settings, make_speculator
from longdraft.bench.tables import median_of
from longdraft.bench.ties import compare_outputs
from longdraft.engine.text_codec import TextCodec
from longdraft.memory import memory_info
from longdraft.memory.prompt_cache import PromptCache
from longdraft.metrics import TokenCounts
from longdraft.model.load.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner

WARM_UP_PROMPT_TOKENS, WARM_UP_NEW_TOKENS = 64, 4  # enough to run all code once

BatchKey = tuple[str, int | None, tuple[str, ...]]
"""Identifies a batch by the data set, the requested length and the origin of each sample."""


@dataclass(frozen=True)
class SampleDifference:
    """The first position at which a method's tokens of a sample differ from those of ``ar``, as in ``Difference``."""

    method: str
    dataset: str
    sample: str  # where the sample comes from: file and line
    position: int
    token: int | None
    reference: int | None
    gap: float | None  # distance of the two tokens' logits; None if one output has ended
    near_tie: bool


@dataclass(frozen=True)
class BatchResult:
    """The measured runs of one batch."""

    dataset: str
    context: int | None  # the length that the prompts were cut to; None: not cut
    batch: int  # number of prompts
    samples: tuple[str, ...]  # origin (file and line) of each prompt
    prompt_tokens: tuple[int, ...]  # number of tokens of each prompt
    cold: dict[str, Run]  # by contender, the run with the contender's own prefill
    # by contender, the timed runs, one for each repeat. A run has many rounds of drafting and verification
    rounds: dict[str, list[Run]]
    differences: list[SampleDifference]  # where tokens differ from those of ``ar``
    comparable: tuple[str, ...]  # contenders whose tokens should equal those of ``ar``
    # by contender, the peak of the process in the timed runs; None if the system reports none
    peak_memory_bytes: dict[str, int | None] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)  # by method, the result of ``profile_job``
    scored: str = ""  # the metric of the answers; empty: not scored
    # by contender, the score of each sample's answer; None: the sample has no reference answers
    scores: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def key(self) -> BatchKey:
        return self.dataset, self.context, self.samples

    def token_counts(self, name: str) -> list[TokenCounts]:
        """Returns each prompt's new tokens and verification forwards, summed over a contender's timed runs."""
        by_prompt = zip(*(run.token_counts for run in self.rounds[name]), strict=False)
        return [(sum(tokens for tokens, _ in runs), sum(forwards for _, forwards in runs)) for runs in by_prompt]

    def tokens_per_second(self, name: str) -> float | None:
        """Returns the median of the tokens/s of a contender's timed runs."""
        return median_of(run.tokens_per_second for run in self.rounds[name])


class Bench:
    """Measures contenders on one loaded model.

    Args:
        load_dequantized: loads the model again, in a plain dtype, for the peers; None: the peers run on ``loaded``.

    Attributes:
        settings: the settings of the benchmark.
        contenders: the contenders by name; ``ar`` is the first.
        target: runs the forwards of the target model.
    """

    def __init__(
        self, loaded: LoadedModel, settings: Settings, progress: Progress | None = None,
        load_dequantized: Callable[[], LoadedModel] | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self._is_warm = False
        methods = [name for name in settings.contenders if name not in PEERS]
        speculators = {name: make_speculator(settings, name, loaded, progress) for name in methods}
        self.target = speculators[REFERENCE].runner()
        feature_layers = {name: spec.feature_layers() for name, spec in speculators.items()}
        default_layers = next(filter(None, feature_layers.values()), ())
        # Methods share a cache of the prompts' KV if they have one target, and want hidden states of the same layers
        # beside the KV. A method that reads no hidden states can use a cache with them.
        prefills: dict[Hashable, SharedPrefill] = {}
        self.contenders: dict[str, Contender] = {}
        peer_target = self.target
        if load_dequantized is not None and len(speculators) < len(settings.contenders):
            peer_target = TargetRunner(load_dequantized().model)
        for name in settings.contenders:
            if name in PEERS:
                same_arithmetic = peer_target.arithmetic == self.target.arithmetic
                self.contenders[name] = TransformersGenerate(peer_target.model, name, same_arithmetic)
                continue
            layers = feature_layers[name] or default_layers
            key = tuple(settings.target_options(name).items()), layers
            prefill = prefills.setdefault(key, SharedPrefill(PromptCache(layers)))
            self.contenders[name] = MethodContender(name, speculators[name], prefill)
        self._codec = TextCodec(loaded.tokenizer)
        self._eos = eos_ids(self.target, loaded.tokenizer, settings.ignore_eos)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.contenders)

    @property
    def methods(self) -> dict[str, MethodContender]:
        """The contenders that are methods of this package."""
        contenders = self.contenders.items()
        return {name: contender for name, contender in contenders if isinstance(contender, MethodContender)}

    @property
    def notes(self) -> dict[str, str]:
        """Remarks about contenders, by name."""
        return {name: contender.note for name, contender in self.contenders.items() if contender.note}

    def warm_up(self, prompt: Prompt) -> None:
        """Lets each contender decode a few tokens before the first batch, whose times then include no one-time work."""
        max_tokens = min(WARM_UP_NEW_TOKENS, self.settings.max_tokens)
        job = self.make_job([prompt.token_ids[:WARM_UP_PROMPT_TOKENS]], max_tokens)
        for contender in () if self._is_warm else self.contenders.values():
            contender.decode_cold(job)
            contender.release()
        self._is_warm = True

    def measure(self, prompts: Sequence[Prompt], tick: Tick = no_bar) -> BatchResult:
        """Measures one batch. Calls ``tick`` with the contender's name."""
        settings, device = self.settings, self.target.device
        job = self.make_job([prompt.token_ids for prompt in prompts], settings.max_tokens)
        cold: dict[str, Run] = {}
        is_turn_cached = not settings.cold and all(prompt.sample.continues_previous for prompt in prompts)
        for name in self._cold_contenders:
            run_job = job.announced(tick, name)
            contender = self.contenders[name]
            reuses_cache = is_turn_cached and name in self.methods
            cold[name] = contender.decode_warm(run_job) if reuses_cache else contender.decode_cold(run_job)
        rounds: dict[str, list[Run]] = {name: [] for name in self.names}
        peaks: dict[str, int | None] = dict.fromkeys(self.names)
        for _, name in interleave(self.names, settings.repeats):
            run_job = job.announced(tick, name)
            gc.collect()  # so that no collection falls into a timed run
            has_peak = memory_info.reset_peak(device)
            rounds[name].append(self.contenders[name].decode_warm(run_job))
            if has_peak:
                peaks[name] = max(memory_info.peak_bytes(device), peaks[name] or 0)
        # A profile starts from the prompts' cached KV; with ``cold`` it starts with a prefill.
        profiles: dict[str, dict[str, Any]] = {}
        for name, method in self.methods.items() if settings.profile else ():
            if profile := profile_job(method.spec, job, None if settings.cold else method.prefill.cache):
                profiles[name] = profile
        is_greedy, differences = settings.sampling.greedy, list[SampleDifference]()
        comparable = [name for name, c in self.contenders.items() if c.is_comparable(is_greedy, len(prompts))]
        for name in comparable:
            runs = [*rounds[name], *([cold[name]] if name in cold else [])]
            differences += self._differences(prompts, name, runs, rounds)
        is_conversation = bool(prompts[0].sample.messages)  # the next turn can continue the KV of this turn
        for name, contender in self.contenders.items():
            if settings.cold or name not in self.methods or not is_conversation:
                contender.release()
        sample = prompts[0].sample
        return BatchResult(
            dataset=sample.dataset, context=prompts[0].context, batch=len(prompts),
            samples=tuple(prompt.sample.origin for prompt in prompts),
            prompt_tokens=tuple(len(prompt.token_ids) for prompt in prompts),
            cold=cold, rounds=rounds, differences=differences, comparable=tuple(comparable),
            peak_memory_bytes=peaks, profiles=profiles, scored=sample.metric,
            scores={name: self._scores(prompts, timed_runs[0]) for name, timed_runs in rounds.items()},
        )  # fmt: skip

    def _scores(self, prompts: Sequence[Prompt], run: Run) -> list[float | None]:
        """Scores each prompt's answer."""
        texts = (self._codec.decode(list(tokens)) for tokens in run.tokens)
        return [scores.score_answer(prompt.sample, text) for prompt, text in zip(prompts, texts, strict=True)]

    def steps(self, batches: Sequence[PromptBatch]) -> list[Step[BatchKey, BatchResult]]:
        """Makes a step for each batch. The first step that runs warms the contenders up."""

        def measure_batch(batch: PromptBatch, missing: Collection[BatchKey], tick: Tick) -> Iterator[BatchResult]:
            self.warm_up(batch[0])
            yield self.measure(batch, tick)

        def batch_key(batch: PromptBatch) -> BatchKey:
            return batch[0].sample.dataset, batch[0].context, tuple(prompt.sample.origin for prompt in batch)

        num_runs = len(self._cold_contenders) + len(self.names) * self.settings.repeats
        return [
            Step(f"sample {number}/{len(batches)}", (batch_key(batch),), partial(measure_batch, batch), num_runs)
            for number, batch in enumerate(batches, 1)
        ]

    @property
    def _cold_contenders(self) -> list[str]:
        """Names of the contenders that have a cold run. Without ``cold`` the methods use the prefill of ``ar``."""
        skipped = () if self.settings.cold else self.methods
        return [name for name in self.names if name == REFERENCE or name not in skipped]

    def make_job(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Job:
        return Job(tuple(prompts), max_tokens, self.settings.sampling, self.settings.seed, self._eos)

    def _differences(
        self, prompts: Sequence[Prompt], name: str, runs: Sequence[Run], rounds: dict[str, list[Run]]
    ) -> Iterator[SampleDifference]:
        """Compares a contender's ``runs`` with the first timed run of ``ar``. For each sample, yields the difference
        with the largest gap between logits, and of equal gaps the earliest."""
        cache = self.methods[REFERENCE].prefill.cache  # may be overwritten, as the timed runs are over
        for i, prompt in enumerate(prompts):
            reference, sample = rounds[REFERENCE][0].tokens[i], prompt.sample
            compared = [
                compare_outputs(self.target, prompt.token_ids, tokens, reference, self.settings.sampling, cache)
                for tokens in {run.tokens[i] for run in runs} - {reference}
            ]
            if differences := [difference for difference in compared if difference is not None]:
                largest = asdict(max(differences, key=lambda difference: (difference.gap, -difference.position)))
                largest["gap"] = largest["gap"] if math.isfinite(largest["gap"]) else None
                yield SampleDifference(name, sample.dataset, sample.origin, **largest)
