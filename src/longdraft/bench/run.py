"""The measurement of a batch of prompts.

For each batch of prompts every contender decodes once from nothing, which warms it up and gives its time to first
token. Then come the rounds that are timed: all contenders in turn, each from the prompts' KV. Memory is looked at
between the runs.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Any

from longdraft.bench import machine, scores
from longdraft.bench.contenders import Contender, Job, Kept, Ours, Run, ends_of
from longdraft.bench.experiment import Step, Tick, in_turn
from longdraft.bench.hf import Generate
from longdraft.bench.peers import PEERS
from longdraft.bench.profile import profile
from longdraft.bench.prompts import Group, Prompt
from longdraft.bench.settings import REFERENCE, Settings, speculator
from longdraft.bench.ties import Difference, compare
from longdraft.engine.texts import Texts
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner

# Tokens of the warm-up.
WAKE_PROMPT, WAKE_TOKENS = 64, 4


BatchKey = tuple[str, int | None, tuple[str, ...]]
"""A batch's data set, context, and origins of its samples."""


@dataclass(frozen=True)
class Disagreement:
    """A sample where a method's tokens are not those of ``ar``: its first such token, as a :class:`Difference` has it.

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

    @classmethod
    def of(cls, method: str, prompt: Prompt, d: Difference) -> Disagreement:
        gap = d.gap if math.isfinite(d.gap) else None
        sample = prompt.sample
        return cls(method, sample.dataset, sample.origin, d.position, d.token, d.reference, gap, d.near_tie)


@dataclass(frozen=True)
class Measured:
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
    differences: list[Disagreement]
    comparable: tuple[str, ...]
    peak_memory_bytes: dict[str, int | None] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    scored: str = ""
    scores: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def key(self) -> BatchKey:
        return self.dataset, self.context, self.samples

    def tokens_per_second(self, name: str) -> float | None:
        """Median over the rounds."""
        found = [r.tokens_per_second for r in self.rounds[name]]
        return median(x for x in found if x is not None) if any(found) else None


def key_of_group(group: Group) -> BatchKey:
    """The key of a batch that is not measured yet."""
    return group[0].sample.dataset, group[0].context, tuple(prompt.sample.origin for prompt in group)


class Bench:
    """Contenders on one loaded model.

    Args:
        extra: further contenders, for methods that are not registered.
        progress: called with a line of text before something long.
        unpacked: reads the model once more, in a plain dtype, for peers that run on a model object; None: they run on
            ``loaded`` itself.

    Attributes:
        contenders: by name, ``ar`` first.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        extra: Sequence[Contender] = (),
        progress: Progress | None = None,
        unpacked: Callable[[], LoadedModel] | None = None,
    ) -> None:
        self.settings = settings
        self._unpacked, self._awake = unpacked, False
        ours = {name: speculator(settings, name, loaded, progress) for name in settings.contenders if name not in PEERS}
        layers = {name: spec.feature_layers() for name, spec in ours.items()}
        read = next(filter(None, layers.values()), ())
        # Contenders share the prompts' KV if they round it to the same dtype, and read no other hidden states of it.
        self._kept: dict[tuple[str | None, tuple[int, ...]], Kept] = {}
        self.contenders: dict[str, Contender] = {}
        for name in settings.contenders:
            if name in PEERS:
                self.contenders[name] = self._peer(name)
                continue
            place = settings.kv_dtype_of(name), layers[name] or read
            kept = self._kept.setdefault(place, Kept(PromptCache(place[1]), place[1]))
            self.contenders[name] = Ours(name, ours[name], kept)
        self.contenders |= {c.name: c for c in extra}
        self._texts = Texts(loaded.tokenizer)
        self._eos = ends_of(self.target, loaded.tokenizer, settings.ignore_eos)

    def sharing(self, names: Sequence[str]) -> list[tuple[Kept, list[str]]]:
        """Names of ours by the KV that they share."""
        ours = {name: c.kept for name, c in self.contenders.items() if name in names and isinstance(c, Ours)}
        return [(kept, [name for name in ours if ours[name] is kept]) for kept in self._kept.values()]

    def _peer(self, name: str) -> Contender:
        """A peer on the target, or on the unpacked model if it needs one."""
        separate = PEERS[name].unpacked and self._unpacked is not None
        target = self._plain if separate else self.target
        peer = PEERS[name].make(target, self.settings.sources)
        if isinstance(peer, Generate):
            peer.same_arithmetic = target.arithmetic == self.target.arithmetic
        return peer

    @cached_property
    def _plain(self) -> TargetRunner:
        assert self._unpacked is not None
        return TargetRunner(self._unpacked().model)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.contenders)

    @property
    def _ar(self) -> Ours:
        ar = self.contenders[REFERENCE]
        assert isinstance(ar, Ours)
        return ar

    @property
    def target(self) -> TargetRunner:
        """The hosted model."""
        return self._ar.spec.runner()

    @property
    def notes(self) -> dict[str, str]:
        """Remarks about contenders, by name."""
        return {name: c.note for name, c in self.contenders.items() if c.note}

    def wake(self, prompt: Prompt) -> None:
        """Runs each contender for a moment, so that the first batch does not pay for what is done only once."""
        for contender in self.contenders.values():
            contender.cold(self.job([prompt.tokens[:WAKE_PROMPT]], min(WAKE_TOKENS, self.settings.max_tokens)))
            contender.release()
        self._awake = True

    def measure(self, prompts: Sequence[Prompt], tick: Tick = lambda what: None) -> Measured:
        """Measures one batch.

        Args:
            tick: called before each run with the contender's name.
        """
        job = self.job([p.tokens for p in prompts], self.settings.max_tokens)
        cold: dict[str, Run] = {}
        for name, contender in self.contenders.items():
            if self._reads(name):
                tick(name)
                cold[name] = contender.cold(job)
        rounds: dict[str, list[Run]] = {name: [] for name in self.contenders}
        peaks: dict[str, list[int]] = {name: [] for name in self.contenders}
        device = self.target.device
        for _, name in in_turn(self.names, self.settings.repeats):
            tick(name)
            gc.collect()  # or a collection falls due inside somebody's turn
            watched = machine.forget_peak(device)
            rounds[name].append(self.contenders[name].warm(job))
            if watched and (peak := machine.peak_bytes(device)) is not None:
                peaks[name].append(peak)
        profiles = self._profiles(job) if self.settings.profile else {}
        greedy = self.settings.sampling.greedy
        comparable = [name for name, c in self.contenders.items() if c.comparable(greedy, len(prompts))]
        differences = [d for name in comparable for d in self._disagreements(prompts, name, cold, rounds)]
        for contender in self.contenders.values():
            contender.release()
        return Measured(
            prompts[0].sample.dataset,
            prompts[0].context,
            len(prompts),
            tuple(p.sample.origin for p in prompts),
            tuple(len(p.tokens) for p in prompts),
            cold,
            rounds,
            differences,
            tuple(comparable),
            {name: max(found, default=None) for name, found in peaks.items()},
            profiles,
            prompts[0].sample.score,
            {name: self._scores(prompts, runs[0]) for name, runs in rounds.items()},
        )

    def _scores(self, prompts: Sequence[Prompt], run: Run) -> list[float | None]:
        """Scores of a run's answers."""
        texts = (self._texts.decode(list(tokens)) for tokens in run.tokens)
        return [scores.score(prompt.sample, text) for prompt, text in zip(prompts, texts, strict=True)]

    def _profiles(self, job: Job) -> dict[str, dict[str, Any]]:
        """Profiles of our methods by name, on the prompts' KV that is still there; with ``cold`` each reads them."""
        ours = {name: c for name, c in self.contenders.items() if isinstance(c, Ours)}
        found = {name: profile(c.spec, job, None if self.settings.cold else c.kept.cache) for name, c in ours.items()}
        return {name: seen.as_dict() for name, seen in found.items() if seen is not None}

    def steps(self, groups: Sequence[Group]) -> list[Step[BatchKey, Measured]]:
        """A step for each batch. The first one that is measured wakes the contenders."""
        runs = sum(map(self._reads, self.contenders)) + len(self.contenders) * self.settings.repeats

        def measure(group: Group, missing: Collection[BatchKey], tick: Tick) -> Iterator[Measured]:
            if not self._awake:
                self.wake(group[0])
            yield self.measure(group, tick)

        return [
            Step(
                f"sample {number}/{len(groups)}",
                (key_of_group(group),),
                partial(measure, group),
                runs,
            )
            for number, group in enumerate(groups, 1)
        ]

    def _reads(self, name: str) -> bool:
        """True if a contender has a cold run."""
        return self.settings.cold or name == REFERENCE or not isinstance(self.contenders[name], Ours)

    def job(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Job:
        return Job(tuple(prompts), max_tokens, self.settings.sampling, self.settings.seed, self._eos)

    def _disagreements(
        self, prompts: Sequence[Prompt], name: str, cold: dict[str, Run], rounds: dict[str, list[Run]]
    ) -> list[Disagreement]:
        """Every run is compared, the cold one and ``ar``'s own included; a sample counts once, at its worst."""
        found = []
        for i, prompt in enumerate(prompts):
            reference = rounds[REFERENCE][0].tokens[i]
            runs = [*rounds[name], *([cold[name]] if name in cold else [])]
            outputs = {run.tokens[i] for run in runs} - {reference}
            # A batch's first slot is free for the judge now: the rounds are over.
            judged = [
                compare(self.target, prompt.tokens, tokens, reference, self.settings.sampling, self._ar.kept.cache)
                for tokens in outputs
            ]
            differences = [d for d in judged if d is not None]
            if differences:
                worst = max(differences, key=lambda d: (d.gap, -d.position))
                found.append(Disagreement.of(name, prompt, worst))
        return found
