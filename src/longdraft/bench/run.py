"""The measurement of a batch of prompts.

For each batch of prompts every contender decodes once from nothing, which warms it up and gives its time to first
token. Then come the rounds that are timed: all contenders in turn, each from the prompts' KV. Memory is looked at
between the runs. With one prefill for all, a turn of a conversation starts from the KV of the turn before.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from longdraft.bench import scores
from longdraft.bench.contenders import Contender, Job, MethodContender, Run, SharedPrefill, eos_ids
from longdraft.bench.experiment import Step, Tick, interleave
from longdraft.bench.peers import PEERS, TransformersGenerate
from longdraft.bench.profile import profile_rounds
from longdraft.bench.prompts import Prompt, PromptBatch
from longdraft.bench.settings import REFERENCE, Settings, make_speculator
from longdraft.bench.tables import median_of
from longdraft.bench.ties import compare_outputs
from longdraft.engine.text_codec import TextCodec
from longdraft.memory import memory_info
from longdraft.memory.prompt_cache import PromptCache
from longdraft.metrics import TokenCounts
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner

# Tokens of the warm-up.
WAKE_PROMPT, WAKE_TOKENS = 64, 4


BatchKey = tuple[str, int | None, tuple[str, ...]]
"""A batch's data set, context, and origins of its samples."""


@dataclass(frozen=True)
class SampleDifference:
    """A sample where a method's tokens are not those of ``ar``: its first such token, as
    :class:`~longdraft.bench.ties.Difference` has it.

    Attributes:
        sample: its origin. gap: None where one output has ended.
    """

    method: str
    dataset: str
    sample: str
    position: int
    token: int | None
    reference: int | None
    gap: float | None
    near_tie: bool


@dataclass(frozen=True)
class BatchResult:
    """The figures of one batch of one data set.

    Attributes:
        context: the length that the prompts were cut to; None: they are whole.
        samples, prompt_tokens: origin and length of each prompt.
        cold: the runs from nothing, by contender.
        rounds: the timed runs, by contender.
        comparable: contenders whose tokens should be those of ``ar``.
        peak_memory_bytes: of the process in a contender's timed runs; None if the system does not say.
        profiles: see :mod:`longdraft.bench.profile`.
        scored: how answers are scored; empty: not at all.
        scores: of each sample's answer, by contender; None: it has no references.
    """

    dataset: str
    context: int | None
    batch: int
    samples: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    cold: dict[str, Run]
    rounds: dict[str, list[Run]]
    differences: list[SampleDifference]
    comparable: tuple[str, ...]
    peak_memory_bytes: dict[str, int | None] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    scored: str = ""
    scores: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def key(self) -> BatchKey:
        return self.dataset, self.context, self.samples

    def counts(self, name: str) -> list[TokenCounts]:
        """Returns the new tokens and verification forwards of each prompt, summed over the runs."""
        of_prompts = zip(*(run.counts for run in self.rounds[name]), strict=False)
        return [(sum(tokens for tokens, _ in own), sum(forwards for _, forwards in own)) for own in of_prompts]

    def tokens_per_second(self, name: str) -> float | None:
        """Median over the rounds."""
        return median_of(run.tokens_per_second for run in self.rounds[name])


class Bench:
    """Contenders on one loaded model.

    Args:
        progress: called with a line of text before something long.
        unpacked: reads the model once more, in a plain dtype, for peers that run on a model object; None: they run on
            ``loaded`` itself.

    Attributes:
        contenders: by name, ``ar`` first.
        target: the hosted model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        progress: Progress | None = None,
        load_dequantized: Callable[[], LoadedModel] | None = None,
    ) -> None:
        self.settings = settings
        self._awake = False
        ours = {
            name: make_speculator(settings, name, loaded, progress) for name in settings.contenders if name not in PEERS
        }
        self.target = ours[REFERENCE].runner()
        layers = {name: spec.feature_layers() for name, spec in ours.items()}
        read = next(filter(None, layers.values()), ())
        # Contenders share the prompts' KV if they round it to the same dtype, and read no other hidden states of it.
        kept: dict[tuple[str | None, tuple[int, ...]], SharedPrefill] = {}
        self.contenders: dict[str, Contender] = {}
        plain = self.target
        if load_dequantized is not None and len(ours) < len(settings.contenders):
            plain = TargetRunner(load_dequantized().model)
        for name in settings.contenders:
            if name in PEERS:
                self.contenders[name] = TransformersGenerate(
                    plain.model, name, plain.arithmetic == self.target.arithmetic
                )
                continue
            place = settings.kv_dtype_of(name), layers[name] or read
            shared = kept.setdefault(place, SharedPrefill(PromptCache(place[1])))
            self.contenders[name] = MethodContender(name, ours[name], shared)
        self._texts = TextCodec(loaded.tokenizer)
        self._eos = eos_ids(self.target, loaded.tokenizer, settings.ignore_eos)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.contenders)

    @property
    def methods(self) -> dict[str, MethodContender]:
        """The contenders that are methods of this package."""
        return {name: c for name, c in self.contenders.items() if isinstance(c, MethodContender)}

    @property
    def notes(self) -> dict[str, str]:
        """Remarks about contenders, by name."""
        return {name: c.note for name, c in self.contenders.items() if c.note}

    def warm_up(self, prompt: Prompt) -> None:
        """Runs each contender for a moment, once, so that the first batch does not pay for what is done only once."""
        for contender in () if self._awake else self.contenders.values():
            contender.decode_cold(
                self.make_job([prompt.token_ids[:WAKE_PROMPT]], min(WAKE_TOKENS, self.settings.max_tokens))
            )
            contender.release()
        self._awake = True

    def measure(self, prompts: Sequence[Prompt], tick: Tick = lambda what: None) -> BatchResult:
        """Measures one batch.

        Args:
            tick: called before each run with the contender's name.
        """
        s, device = self.settings, self.target.device
        job = self.make_job([p.token_ids for p in prompts], s.max_tokens)
        cold: dict[str, Run] = {}
        goes_on = not s.cold and all(
            p.sample.continues_previous for p in prompts
        )  # what was read for the turn before is there
        for name in self._reading:
            tick(name)
            contender = self.contenders[name]
            cold[name] = contender.decode_warm(job) if goes_on and name in self.methods else contender.decode_cold(job)
        rounds: dict[str, list[Run]] = {name: [] for name in self.names}
        peaks: dict[str, int | None] = dict.fromkeys(self.names)
        for _, name in interleave(self.names, s.repeats):
            tick(name)
            gc.collect()  # or a collection falls due inside somebody's turn
            watched = memory_info.reset_peak(device)
            rounds[name].append(self.contenders[name].decode_warm(job))
            if watched:
                peaks[name] = max(memory_info.peak_bytes(device), peaks[name] or 0)
        # On the prompts' KV that is still there; with ``cold`` each method reads them itself.
        looked = self.methods.items() if s.profile else ()
        profiles = {name: profile_rounds(c.spec, job, None if s.cold else c.prefill.cache) for name, c in looked}
        comparable = [name for name, c in self.contenders.items() if c.is_comparable(s.sampling.greedy, len(prompts))]
        outputs = {name: [*rounds[name], *([cold[name]] if name in cold else [])] for name in comparable}
        differences = [d for name, runs in outputs.items() for d in self._disagreements(prompts, name, runs, rounds)]
        for name, contender in self.contenders.items():
            if s.cold or name not in self.methods or not prompts[0].sample.last_message:
                contender.release()
        return BatchResult(
            prompts[0].sample.dataset,
            prompts[0].context,
            len(prompts),
            tuple(p.sample.origin for p in prompts),
            tuple(len(p.token_ids) for p in prompts),
            cold,
            rounds,
            differences,
            tuple(comparable),
            peaks,
            {name: seen for name, seen in profiles.items() if seen is not None},
            prompts[0].sample.metric,
            {name: self._scores(prompts, runs[0]) for name, runs in rounds.items()},
        )

    def _scores(self, prompts: Sequence[Prompt], run: Run) -> list[float | None]:
        """Scores of a run's answers."""
        texts = (self._texts.decode(list(tokens)) for tokens in run.tokens)
        return [scores.score_answer(prompt.sample, text) for prompt, text in zip(prompts, texts, strict=True)]

    def steps(self, groups: Sequence[PromptBatch]) -> list[Step[BatchKey, BatchResult]]:
        """A step for each batch. The first one that is measured wakes the contenders."""

        def measure(group: PromptBatch, missing: Collection[BatchKey], tick: Tick) -> Iterator[BatchResult]:
            self.warm_up(group[0])
            yield self.measure(group, tick)

        def key(group: PromptBatch) -> BatchKey:
            return group[0].sample.dataset, group[0].context, tuple(prompt.sample.origin for prompt in group)

        runs = len(self._reading) + len(self.names) * self.settings.repeats
        return [
            Step(f"sample {number}/{len(groups)}", (key(group),), partial(measure, group), runs)
            for number, group in enumerate(groups, 1)
        ]

    @property
    def _reading(self) -> list[str]:
        """The contenders that have a cold run."""
        sharing = () if self.settings.cold else self.methods
        return [name for name in self.names if name == REFERENCE or name not in sharing]

    def make_job(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Job:
        return Job(tuple(prompts), max_tokens, self.settings.sampling, self.settings.seed, self._eos)

    def _disagreements(
        self, prompts: Sequence[Prompt], name: str, runs: Sequence[Run], rounds: dict[str, list[Run]]
    ) -> Iterator[SampleDifference]:
        """Every run is compared, the cold one and ``ar``'s own included; a sample counts once, at its worst."""
        cache = self.methods[REFERENCE].prefill.cache  # its first slot is free for the judge now: the rounds are over
        for i, prompt in enumerate(prompts):
            reference, sample = rounds[REFERENCE][0].tokens[i], prompt.sample
            judged = [
                compare_outputs(self.target, prompt.token_ids, tokens, reference, self.settings.sampling, cache)
                for tokens in {run.tokens[i] for run in runs} - {reference}
            ]
            if differences := [d for d in judged if d is not None]:
                worst = asdict(max(differences, key=lambda d: (d.gap, -d.position)))
                worst["gap"] = worst["gap"] if math.isfinite(worst["gap"]) else None
                yield SampleDifference(name, sample.dataset, sample.origin, **worst)
