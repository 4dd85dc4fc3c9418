"""The measuring loop.

For each batch of prompts every contender decodes once from nothing, which warms it up and gives its time to first
token. Then come the rounds that are timed: all contenders in turn, each from the prompts' KV, the order turned round
from one round to the next, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from longdraft.bench.contenders import Contender, Job, Kept, Ours, Run
from longdraft.bench.data import Sample, fitted
from longdraft.bench.peers import PEERS, peer
from longdraft.bench.ties import Difference, compare
from longdraft.drafters import draft_folder
from longdraft.errors import ContextError, PromptError, UnknownMethodError
from longdraft.kv import offload as offloading
from longdraft.kv.prompt_cache import PromptCache
from longdraft.methods import METHODS, asked_for, method_of
from longdraft.speculator import Speculator
from longdraft.target.loading import LoadedModel
from longdraft.target.runner import TargetRunner
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
        context: tokens that a prompt has at most; None leaves them as they are.
        batch: prompts decoded together.
        repeats: timed rounds.
        raw: prompts as plain text, without the chat template.
        ignore_eos: decode on to ``max_tokens``.
        cold: every method reads the prompts once itself, which gives its time to first token. Without it the first of
            ours reads them for all of ours.
        draft_options: options of the methods that take a draft: ``draft``, ``widths``, ``nodes``.
        own_options: further options of one contender, by its name: ``specpv:budget=512`` is ``specpv`` with that.
        offload: where our methods keep the KV; see :class:`~longdraft.speculator.Speculator`. Peers keep theirs.
    """

    methods: tuple[str, ...] = (REFERENCE, "prompt-lookup")
    max_tokens: int = 64
    context: int | None = None
    batch: int = 1
    repeats: int = 3
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    raw: bool = False
    ignore_eos: bool = False
    cold: bool = True
    draft_options: Mapping[str, Any] = field(default_factory=dict)
    own_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    offload: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.context is not None and self.context < 1:
            raise ValueError(f"context must be at least 1, got {self.context}")
        for name in self.methods:
            if method_name(name) not in METHODS and name not in PEERS:
                raise UnknownMethodError(
                    f"There is no method {name!r}. Methods: {', '.join(METHODS)}. To compare with: {', '.join(PEERS)}."
                )
            if name not in PEERS:
                asked_for(method_name(name), self.options(name))  # a wrong option, or a draft that cannot be read
        offloading.parse(self.offload)
        if self.draft_options and not any(self.takes_draft(name) for name in self.methods):
            needing = ", ".join(m.name for m in METHODS.values() if m.takes_draft)
            raise ValueError(
                f"none of the methods takes {', '.join(self.draft_options)}: add one that does ({needing})"
            )

    def options(self, name: str) -> Mapping[str, Any]:
        """The options of a contender of ours."""
        return {**self._shared(name), **self.own_options.get(name, {})}

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
    """A sample as the model reads it."""

    sample: Sample
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Disagreement:
    """A sample where a method's tokens are not those of ``ar``."""

    sample: Sample
    method: str
    difference: Difference


@dataclass(frozen=True)
class Measured:
    """One batch of one dataset: what each contender took, and where it differed.

    Attributes:
        cold: the run from nothing, by name, of those that had one.
        rounds: the timed runs, by name.
        comparable: names whose tokens are meant to be those of ``ar``.
    """

    prompts: tuple[Prompt, ...]
    cold: dict[str, Run]
    rounds: dict[str, list[Run]]
    disagreements: list[Disagreement]
    comparable: frozenset[str]

    @property
    def dataset(self) -> str:
        return self.prompts[0].sample.dataset

    def tokens_per_second(self, name: str) -> float | None:
        """Median over the rounds."""
        found = [r.tokens_per_second for r in self.rounds[name]]
        return median(x for x in found if x is not None) if any(found) else None


def prepare(samples: Sequence[Sample], loaded: LoadedModel, settings: Settings) -> list[Prompt]:
    """Encodes every sample before anything is measured.

    Raises:
        ContextError: for a prompt that with its budget exceeds the model's context, naming file and line.
    """
    limit = TargetRunner(loaded.model).context_length
    prompts = []
    for sample in samples:
        tokens = fitted(sample, loaded.tokenizer, settings.context, settings.raw)
        if len(tokens) + settings.max_tokens > limit:
            raise ContextError(
                f"{sample.origin} has {len(tokens)} tokens; with {settings.max_tokens} new ones that is more than the "
                f"model's context of {limit}. Cut the documents with --context {limit - settings.max_tokens}."
            )
        prompts.append(Prompt(sample, tuple(tokens)))
    return prompts


def batches(prompts: Sequence[Prompt], size: int) -> tuple[list[tuple[Prompt, ...]], int]:
    """Batches of exactly ``size``, none across datasets, and how many prompts were left over.

    Raises:
        PromptError: when no dataset fills a batch.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.sample.dataset, []).append(prompt)
    full = [tuple(group[i : i + size]) for group in groups.values() for i in range(0, len(group) - size + 1, size)]
    if not full:
        raise PromptError(f"No dataset has {size} samples, so there is no batch of {size}. Lower --batch.")
    return full, len(prompts) - size * len(full)


class Bench:
    """Contenders on one loaded model.

    Args:
        extra: further contenders, for methods that are not registered.
    """

    def __init__(self, loaded: LoadedModel, settings: Settings, extra: Sequence[Contender] = ()) -> None:
        self.settings = settings
        self._kept = Kept(PromptCache())
        self._runner: TargetRunner | None = None
        self._contenders: dict[str, Contender] = {}
        for name in settings.contenders:
            if name in PEERS:
                self._contenders[name] = peer(name, loaded.model)
                continue
            spec = Speculator(
                method_name(name),
                target=loaded.model,
                tokenizer=loaded.tokenizer,
                offload=settings.offload,
                **settings.options(name),
            )
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
        for i in range(self.settings.repeats):
            for name in self.names if i % 2 == 0 else reversed(self.names):
                tick(name)
                gc.collect()  # or a collection falls due inside somebody's turn
                rounds[name].append(self._contenders[name].warm(job))
        comparable = self._comparable(len(prompts))
        disagreements = [d for name in comparable for d in self._disagreements(prompts, name, cold, rounds)]
        for contender in self._contenders.values():
            contender.release()
        return Measured(tuple(prompts), cold, rounds, disagreements, frozenset(comparable))

    def runs(self, batch_count: int) -> int:
        """How many times ``tick`` is called for so many batches."""
        reading = sum(map(self._reads, self._contenders))
        return batch_count * (reading + len(self._contenders) * self.settings.repeats)

    def _reads(self, name: str) -> bool:
        """Whether a contender has a cold run."""
        return self.settings.cold or name == REFERENCE or not isinstance(self._contenders[name], Ours)

    def _job(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Job:
        return Job(tuple(prompts), max_tokens, self.settings.sampling, self.settings.seed, self._eos)

    def _comparable(self, batch: int) -> list[str]:
        """Whose tokens are meant to be those of ``ar``.

        A batch of ``generate`` draws all its rows from one generator, ours each from its own: no row agrees. An
        approximate method may differ.
        """
        drawn_together = batch > 1 and not self.settings.sampling.greedy
        loose = {name for name in self.names if method_name(name) in METHODS and not METHODS[method_name(name)].exact}
        return [name for name in self.names if name not in loose and not (drawn_together and name in PEERS)]

    def _disagreements(
        self, prompts: Sequence[Prompt], name: str, cold: dict[str, Run], rounds: dict[str, list[Run]]
    ) -> list[Disagreement]:
        """Every run is compared, the cold one and ``ar``'s own included; a sample counts once, at its worst."""
        assert self._runner is not None
        found = []
        for i, prompt in enumerate(prompts):
            reference = rounds[REFERENCE][0].tokens[i]
            runs = [*rounds[name], *([cold[name]] if name in cold else [])]
            outputs = {run.tokens[i] for run in runs} - {reference}
            # A batch's first slot is free for the judge now: the rounds are over.
            judged = [
                compare(self._runner, prompt.tokens, tokens, reference, self.settings.sampling, self._kept.cache)
                for tokens in outputs
            ]
            differences = [d for d in judged if d is not None]
            if differences:
                worst = max(differences, key=lambda d: (d.gap, -d.position))
                found.append(Disagreement(prompt.sample, name, worst))
        return found
