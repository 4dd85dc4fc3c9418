"""The measuring loop.

For each batch of prompts every contender decodes once from nothing, which warms it up and gives its time to first
token. Then come the rounds that are timed: all contenders in turn, each from the prompts' KV, the order turned round
from one round to the next, so that a machine that slows down slows all of them. Memory is looked at between the runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from longdraft.bench import machine, peers
from longdraft.bench.contenders import Contender, Job, Kept, Ours, Run
from longdraft.bench.data import Sample, fitted
from longdraft.bench.peers import PEERS, Sources
from longdraft.bench.profile import profile
from longdraft.bench.ties import Difference, compare
from longdraft.drafters import draft_folder
from longdraft.errors import ContextError, PromptError, UnknownMethodError
from longdraft.host.checkpoints import LoadedModel, Progress
from longdraft.host.runner import TargetRunner
from longdraft.kv import offload as offloading
from longdraft.kv.prompt_cache import PromptCache
from longdraft.methods import METHODS, method_of
from longdraft.planning import choice
from longdraft.recipes import asked_for
from longdraft.speculator import Speculator
from longdraft.verify.sampling import Sampling

REFERENCE = "ar"
# Tokens of the very first run of each contender, not measured: it pays for what a process does only once.
WAKE_PROMPT, WAKE_TOKENS = 64, 4


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        methods: names of methods and peers.
        max_tokens: new tokens at most, a prompt.
        contexts: tokens that a prompt has at most, each measured; None leaves them as they are.
        batches: prompts decoded together, each measured.
        repeats: timed rounds.
        raw: prompts as plain text, without the chat template.
        ignore_eos: decode on to ``max_tokens``.
        cold: every method reads the prompts once itself, which gives its time to first token. Without it the first of
            ours reads them for all of ours.
        draft_options: options of the methods that take a draft: ``draft``, ``widths``, ``nodes``.
        own_options: further options of one contender, by its name: ``specpv:budget=512`` is ``specpv`` with that.
            One of them may be its ``plan``.
        plan: how our methods size their trees; see :class:`~longdraft.speculator.Speculator`.
        offload: where our methods keep the KV; see :class:`~longdraft.speculator.Speculator`. Peers keep theirs.
        sources: where peers have their own weights from.
        profile: look into some rounds of our methods, after the timed ones.
    """

    methods: tuple[str, ...] = (REFERENCE, "prompt-lookup")
    max_tokens: int = 64
    contexts: tuple[int | None, ...] = (None,)
    batches: tuple[int, ...] = (1,)
    repeats: int = 3
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    raw: bool = False
    ignore_eos: bool = False
    cold: bool = True
    draft_options: Mapping[str, Any] = field(default_factory=dict)
    own_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plan: str | None = None
    offload: str | Path | None = None
    sources: Sources = field(default_factory=Sources)
    profile: bool = False

    def __post_init__(self) -> None:
        given = {
            "max-tokens": (self.max_tokens,), "repeats": (self.repeats,), "batch": self.batches,
            "context": tuple(c for c in self.contexts if c is not None),
        }  # fmt: skip
        for name, values in given.items():
            if values and min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {min(values)}")
        if not self.contexts or not self.batches:
            raise ValueError("context and batch must name one value at least")
        for name in self.methods:
            if method_name(name) not in METHODS and name not in PEERS:
                raise UnknownMethodError(
                    f"There is no method {name!r}. Methods: {', '.join(METHODS)}. To compare with: {', '.join(PEERS)}."
                )
            if name not in PEERS:
                asked_for(method_name(name), self.options(name))  # a wrong option, or a draft that cannot be read
            choice.checked(self.plan_of(name))
        offloading.parse(self.offload)
        peers.check(self.methods, self.sources, max(self.batches))
        if self.draft_options and not any(self.takes_draft(name) for name in self.methods):
            needing = ", ".join(m.name for m in METHODS.values() if m.takes_draft)
            raise ValueError(
                f"none of the methods takes {', '.join(self.draft_options)}: add one that does ({needing})"
            )

    def options(self, name: str) -> Mapping[str, Any]:
        """The options of a contender of ours."""
        return {**self._shared(name), **{k: x for k, x in self.own_options.get(name, {}).items() if k != "plan"}}

    def plan_of(self, name: str) -> str | None:
        """How a contender of ours sizes its trees."""
        plan: str | None = self.own_options.get(name, {}).get("plan", self.plan)
        return plan

    def takes_draft(self, name: str) -> bool:
        """Whether the draft options are for this contender."""
        return name not in PEERS and METHODS[method_name(name)].takes_draft

    def _shared(self, name: str) -> Mapping[str, Any]:
        """The draft options. A draft folder goes to the methods that can take its kind, if there are any."""
        if not self.takes_draft(name):
            return {}
        draft = self.draft_options.get("draft")
        if isinstance(draft, str | Path) and draft_folder.is_draft_folder(draft):
            kind = method_of(draft).draft_kind
            readers = [
                n for n in self.methods if self.takes_draft(n) and METHODS[method_name(n)].draft_kind in (kind, None)
            ]
            if readers and name not in readers:
                return {k: x for k, x in self.draft_options.items() if k != "draft"}
        return self.draft_options

    @property
    def contenders(self) -> tuple[str, ...]:
        """The names once each, ``ar`` first: everything is measured against it."""
        return tuple(dict.fromkeys((REFERENCE, *self.methods)))


def method_name(contender: str) -> str:
    """``specpv`` of ``specpv:budget=512``."""
    return contender.partition(":")[0]


@dataclass(frozen=True)
class Prompt:
    """A sample as the model reads it. ``context``: what it was cut for."""

    sample: Sample
    tokens: tuple[int, ...]
    context: int | None = None


Group = tuple[Prompt, ...]
"""Prompts that are decoded together."""


@dataclass(frozen=True)
class Disagreement:
    """A sample where a method's tokens are not those of ``ar``. ``sample``: its origin."""

    method: str
    dataset: str
    sample: str
    difference: Difference


@dataclass(frozen=True)
class Measured:
    """One batch of one dataset: what each contender took, and where it differed.

    Attributes:
        context: what the prompts were cut for.
        samples, prompt_tokens: origin and length of each prompt.
        cold: the run from nothing, by name, of those that had one.
        rounds: the timed runs, by name.
        comparable: names whose tokens are meant to be those of ``ar``.
        peak_memory_bytes: the process's while the timed runs of a name lasted; None where the system does not say.
        profiles: where the rounds of a name spend their time; see :mod:`longdraft.bench.profile`.
    """

    dataset: str
    context: int | None
    samples: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    cold: dict[str, Run]
    rounds: dict[str, list[Run]]
    disagreements: list[Disagreement]
    comparable: frozenset[str]
    peak_memory_bytes: dict[str, int | None] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return len(self.samples)

    def tokens_per_second(self, name: str) -> float | None:
        """Median over the rounds."""
        found = [r.tokens_per_second for r in self.rounds[name]]
        return median(x for x in found if x is not None) if any(found) else None


def prepare(samples: Sequence[Sample], loaded: LoadedModel, settings: Settings) -> list[Prompt]:
    """Encodes every sample for every context before anything is measured.

    Raises:
        ContextError: for a prompt that with its budget exceeds the model's context, naming file and line.
    """
    limit = TargetRunner(loaded.model).context_length
    prompts = []
    for sample in samples:
        for context in settings.contexts:
            tokens = fitted(sample, loaded.tokenizer, context, settings.raw)
            if len(tokens) + settings.max_tokens > limit:
                raise ContextError(
                    f"{sample.origin} has {len(tokens)} tokens; with {settings.max_tokens} new ones that is more than "
                    f"the model's context of {limit}. Cut the documents with --context {limit - settings.max_tokens}."
                )
            prompts.append(Prompt(sample, tuple(tokens), context))
    return prompts


def batches(prompts: Sequence[Prompt], size: int) -> tuple[list[Group], int]:
    """Batches of exactly ``size``, none across datasets or contexts, and how many prompts were left over.

    Raises:
        PromptError: when no dataset fills a batch.
    """
    groups: dict[tuple[str, int | None], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.sample.dataset, prompt.context), []).append(prompt)
    full = [tuple(group[i : i + size]) for group in groups.values() for i in range(0, len(group) - size + 1, size)]
    if not full:
        raise PromptError(f"No dataset has {size} samples, so there is no batch of {size}. Lower --batch.")
    return full, len(prompts) - size * len(full)


def grid(prompts: Sequence[Prompt], settings: Settings) -> tuple[list[Group], dict[int, int]]:
    """Every batch that is to be measured, dataset by dataset, then by context; and by batch how many were left over.

    Raises:
        PromptError: when no dataset fills a batch.
    """
    found: list[Group] = []
    left: dict[int, int] = {}
    for size in dict.fromkeys(settings.batches):
        full, left[size] = batches(prompts, size)
        found += full
    place = {cell: i for i, cell in enumerate(dict.fromkeys((p.sample.dataset, p.context) for p in prompts))}
    # The sort is stable: batches of a cell stay in their order.
    return sorted(found, key=lambda g: place[g[0].sample.dataset, g[0].context]), left


class Bench:
    """Contenders on one loaded model.

    Args:
        extra: further contenders, for methods that are not registered.
        progress: called with a line of text before something long.
        unpacked: reads the model once more, in a plain dtype, for the peers that run on a model object; None: they run
            on ``loaded`` itself.
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
        self._kept = Kept(PromptCache())
        self._runner: TargetRunner | None = None
        plain: TargetRunner | None = None
        self._contenders: dict[str, Contender] = {}
        for name in settings.contenders:
            if name in PEERS:
                # Behind ar, which is always the first: peers share its runner, unless they need another model.
                assert self._runner is not None
                target = self._runner
                if unpacked is not None and PEERS[name].unpacked:
                    target = plain = plain or TargetRunner(unpacked().model)
                self._contenders[name] = PEERS[name].make(target, settings.sources)
                continue
            spec = Speculator(
                method_name(name),
                target=loaded.model,
                tokenizer=loaded.tokenizer,
                offload=settings.offload,
                plan=settings.plan_of(name),
                **settings.options(name),
            )
            spec.planner(progress)
            self._runner = self._runner or spec.runner()
            self._contenders[name] = Ours(name, spec, self._kept)
        self._contenders |= {c.name: c for c in extra}
        assert self._runner is not None  # ar is always there
        self._eos: frozenset[int] = frozenset()
        if not settings.ignore_eos:
            own = loaded.tokenizer.eos_token_id
            self._eos = self._runner.eos_token_ids | (frozenset() if own is None else {int(own)})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._contenders)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return tuple(self._contenders.values())

    @property
    def target(self) -> TargetRunner:
        """The hosted model."""
        assert self._runner is not None
        return self._runner

    @property
    def notes(self) -> dict[str, str]:
        """What has to be said of a contender, by name."""
        return {name: c.note for name, c in self._contenders.items() if c.note}

    def wake(self, prompt: Prompt) -> None:
        """Runs each contender for a moment, so that the first batch does not pay for what is done once."""
        for contender in self._contenders.values():
            contender.cold(self._job([prompt.tokens[:WAKE_PROMPT]], min(WAKE_TOKENS, self.settings.max_tokens)))
            contender.release()

    def measure(self, prompts: Sequence[Prompt], tick: Callable[[str], None] = lambda what: None) -> Measured:
        """Measures one batch.

        Args:
            tick: called before each run with the contender's name.
        """
        job = self._job([p.tokens for p in prompts], self.settings.max_tokens)
        cold: dict[str, Run] = {}
        for name, contender in self._contenders.items():
            if self._reads(name):
                tick(name)
                cold[name] = contender.cold(job)
        rounds: dict[str, list[Run]] = {name: [] for name in self._contenders}
        peaks: dict[str, list[int]] = {name: [] for name in self._contenders}
        device = self.target.device
        for i in range(self.settings.repeats):
            for name in self.names if i % 2 == 0 else reversed(self.names):
                tick(name)
                gc.collect()  # or a collection falls due inside somebody's turn
                watched = machine.forget_peak(device)
                rounds[name].append(self._contenders[name].warm(job))
                if watched and (peak := machine.peak_bytes(device)) is not None:
                    peaks[name].append(peak)
        profiles = self._profiles(job) if self.settings.profile else {}
        greedy = self.settings.sampling.greedy
        comparable = [name for name, c in self._contenders.items() if c.comparable(greedy, len(prompts))]
        disagreements = [d for name in comparable for d in self._disagreements(prompts, name, cold, rounds)]
        for contender in self._contenders.values():
            contender.release()
        return Measured(
            prompts[0].sample.dataset,
            prompts[0].context,
            tuple(p.sample.origin for p in prompts),
            tuple(len(p.tokens) for p in prompts),
            cold,
            rounds,
            disagreements,
            frozenset(comparable),
            {name: max(found, default=None) for name, found in peaks.items()},
            profiles,
        )

    def _profiles(self, job: Job) -> dict[str, dict[str, Any]]:
        """Of our methods, by name; the prompts' KV is still there."""
        ours = {name: c.spec for name, c in self._contenders.items() if isinstance(c, Ours)}
        found = {name: profile(spec, job, self._kept.cache) for name, spec in ours.items()}
        return {name: seen.as_dict() for name, seen in found.items() if seen is not None}

    def runs(self, batch_count: int) -> int:
        """How many times ``tick`` is called for so many batches."""
        reading = sum(map(self._reads, self._contenders))
        return batch_count * (reading + len(self._contenders) * self.settings.repeats)

    def _reads(self, name: str) -> bool:
        """Whether a contender has a cold run."""
        return self.settings.cold or name == REFERENCE or not isinstance(self._contenders[name], Ours)

    def _job(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Job:
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
                compare(self.target, prompt.tokens, tokens, reference, self.settings.sampling, self._kept.cache)
                for tokens in outputs
            ]
            differences = [d for d in judged if d is not None]
            if differences:
                worst = max(differences, key=lambda d: (d.gap, -d.position))
                found.append(Disagreement(name, prompt.sample.dataset, prompt.sample.origin, worst))
        return found
