"""Measures acceptance by context length: cuts the same texts to several lengths, and decodes them with each draft.

Lengths beyond the target's trained context are measured on the target stretched by YaRN. A text is prefilled once, at
its greatest length; shorter cuts, all methods and all temperatures start from this KV. Trees have the methods' default
shapes, without a planner.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from longdraft.bench import machine
from longdraft.bench.contenders import MethodContender, Run
from longdraft.bench.data import Sample, SamplingScheme, ShortTextPolicy
from longdraft.bench.experiment import Step, Tick, interleave
from longdraft.bench.prompts import Prompt, prompts_of_length
from longdraft.bench.records import RecordFile, fingerprint, jsonable, make_header
from longdraft.bench.rejection_sampling import RejectionSamplingJob
from longdraft.bench.results import model_entry
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from longdraft.drafts import shipped
from longdraft.errors import CapabilityError, ContextError, PromptError, UnsupportedModelError
from longdraft.model.load.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner
from longdraft.registry import METHODS

FORMAT, VERSION = "longdraft-acceptance", 1
# Every run computes this many last tokens of the prompt again. Some drafters choose their view of the context by the
# queries of the last tokens, and a KV cache holds no queries.
RECOMPUTED_TOKENS = 64
# Methods that also run the target on a part of its KV (partial verification). Partial forwards do not count as
# verifications, so the accepted lengths of these methods cannot be compared with those of other methods.
PARTIAL_METHODS = ("tokenswift", "triforce")


@dataclass(frozen=True)
class RunKey:
    """Identifies a run within a file by the settings in which the runs of the file differ."""

    method: str
    options: str  # the method's options as JSON
    draft: str  # fingerprint of the method's draft; empty: no draft
    temperature: float
    length: int  # requested tokens of the prompt
    rope_factor: float | None  # YaRN factor of the target; None: not stretched
    dataset: str
    sample: str  # where the text comes from: file and line
    prompt: str  # digest of the prompt's token ids
    sampling: str = "coupled"  # a ``SamplingScheme``; "coupled" for greedy decoding


@dataclass(frozen=True)
class AcceptanceRun:
    """The measured run of one prompt."""

    asked: RunKey
    prompt_tokens: int
    new_tokens: int  # number of emitted tokens, without the token of the prefill
    verifications: int  # number of target forwards that emitted the new tokens
    # for each verification, how many drafted tokens were accepted, and how many ``max_tokens`` allowed
    accepted: tuple[tuple[int, int], ...]
    # median decode seconds of the repeats. Old versions wrote None, or the seconds of the fastest repeat
    seconds: float | None = field(default=None, compare=False)


AcceptanceStep = Step[RunKey, AcceptanceRun]


def open_records(path: Path, settings: Settings, model: Mapping[str, Any]) -> RecordFile[AcceptanceRun]:
    """Opens a file of runs. Later runs may add other methods, lengths, temperatures and prompts to the file.

    Raises:
        LongdraftError: see :class:`~longdraft.bench.records.RecordFile`.
    """
    shared = {name: getattr(settings, name) for name in ("max_tokens", "seed", "ignore_eos", "raw")}
    if not settings.sampling.foresee:
        shared["foresee"] = False
    content = {"settings": shared, "model": model, "versions": machine.versions()}
    return RecordFile(path, make_header(FORMAT, VERSION, content), AcceptanceRun)


def default_methods(target: TargetRunner) -> tuple[str, ...]:
    """Returns the methods whose draft for this target ships with the package, without :data:`PARTIAL_METHODS`."""
    try:
        description = target.shared_parts.description
    except UnsupportedModelError:
        return ()
    drafting = [method for method in METHODS.values() if method.needs_draft and method.name not in PARTIAL_METHODS]
    return tuple(method.name for method in drafting if shipped.find_draft(description, method.draft_kind) is not None)


def lengths_by_rope_factor(lengths: Sequence[int], context: int) -> dict[float | None, list[int]]:
    """Groups lengths (in tokens) by the YaRN factor that they need: None within the context, else a power of two."""
    lengths_by_factor: dict[float | None, list[int]] = {}
    for length in sorted(set(lengths)):
        factor = None if length <= context else 2.0 ** math.ceil(math.log2(length / context))
        lengths_by_factor.setdefault(factor, []).append(length)
    return lengths_by_factor


class AcceptanceBench:
    """Measures methods on a target, and on the target stretched by YaRN. Keeps one target in memory at a time.

    Args:
        loaded: the target, not stretched by the bench.
        load: loads the target again, stretched by a YaRN factor in addition to the user's settings.
        temperatures: the sampling temperatures to measure; 0: greedy.
        name: the model's name as the user wrote it.
        repeats: how often each run is repeated. A run's seconds are the median of the repeats.
        sampling: how drafted tokens are accepted at T > 0.

    Attributes:
        context_length: the target's context (tokens), not stretched by the bench.
        model_entry: the target's entry in the header of a file.
        notes: remarks on texts and lengths that are not as requested.

    Raises:
        CapabilityError: a method's draft is missing.
        CheckpointError: a draft was made for another target.
    """

    def __init__(
        self, loaded: LoadedModel, settings: Settings, load: Callable[[float], LoadedModel],
        temperatures: Sequence[float], name: str, progress: Progress | None = None, repeats: int = 1,
        sampling: SamplingScheme = "coupled",
    ) -> None:  # fmt: skip
        self._load, self._temperatures, self._repeats, self._sampling = load, temperatures, repeats, sampling
        self.settings, self._tokenizer, self.notes = settings, loaded.tokenizer, list[str]()
        self._rope_factor: float | None = None  # of the target in memory
        bench = Bench(loaded, settings, progress=progress)
        self._bench: Bench | None = bench
        self.context_length, self.model_entry = bench.target.context_length, model_entry(bench.target, name)
        drafts = {name: contender.draft for name, contender in bench.methods.items()}
        self._draft_fingerprints = {name: fingerprint(draft) if draft else "" for name, draft in drafts.items()}

    def _load_stretched(self, factor: float | None) -> None:
        """Loads the target with this YaRN factor. If that fails, adds a note and sets ``_bench`` to None."""
        if factor != self._rope_factor:
            self._rope_factor, self._bench = factor, None
            gc.collect()
            try:
                self._bench = Bench(self._load(factor or 1.0), self.settings)
            except CapabilityError as error:
                self.notes.append(f"Lengths that need a factor of {factor or 1:g} are left out: {error}")

    def steps(self, samples: Sequence[Sample], lengths: Sequence[int], short: ShortTextPolicy) -> list[AcceptanceStep]:
        """Makes a step for each text and YaRN factor.

        Raises:
            ContextError: the target has no room for new tokens.
            PromptError: every text is shorter than all of the lengths.
        """
        settings, max_tokens = self.settings, self.settings.max_tokens
        steps: list[AcceptanceStep] = []
        for factor, factor_lengths in lengths_by_rope_factor(lengths, self.context_length).items():
            context = int(self.context_length * (factor or 1.0))
            if context <= max_tokens:
                raise ContextError(f"{max_tokens:,} new tokens fill the context of {context:,}: lower --max-tokens.")
            by_sample: dict[Sample, list[Prompt]] = {}
            for length in factor_lengths:
                prompts, notes = prompts_of_length(
                    samples, length, context - max_tokens, self._tokenizer, short, settings.raw,
                    **settings.template_kwargs,
                )  # fmt: skip
                self.notes += notes
                for prompt in prompts:
                    by_sample.setdefault(prompt.sample, []).append(prompt)
            stretched = "" if factor is None else f", the model stretched {factor:g} times"
            for sample, prompts in by_sample.items():
                prompts.reverse()  # the longest first: shorter prompts start from its KV
                name, measure = f"{Path(sample.origin).name}{stretched}", partial(self._measure, prompts, factor)
                steps.append(Step(name, self._run_keys(prompts, factor), measure, self._repeats))
        if not steps:
            raise PromptError(" ".join(self.notes))
        return steps

    def _run_keys(self, prompts: Sequence[Prompt], factor: float | None) -> list[RunKey]:
        """Returns the keys of all runs of some prompts, on the target stretched by a YaRN factor."""
        methods = self.settings.methods
        options = {name: json.dumps(jsonable(self.settings.options(name)), sort_keys=True) for name in methods}
        return [
            RunKey(
                name, options[name], self._draft_fingerprints[name], temperature, prompt.context or 0, factor,
                prompt.sample.dataset, prompt.sample.origin, prompt.digest,
                self._sampling if temperature else "coupled",
            )
            for prompt, name, temperature in product(prompts, methods, self._temperatures)
        ]  # fmt: skip

    def _measure(
        self, prompts: Sequence[Prompt], factor: float | None, missing: Collection[RunKey], tick: Tick
    ) -> Iterator[AcceptanceRun]:
        """Yields the missing runs of a sample's prompts; nothing if the target cannot be stretched by the factor."""
        self._load_stretched(factor)
        if self._bench is None:
            return
        if self._repeats > 1:  # a median is compared between methods: it must not include one-time work
            self._bench.warm_up(prompts[0])
        methods = self.settings.methods
        contenders = {name: contender for name, contender in self._bench.methods.items() if name in methods}
        # Methods that share a prefill run one after the other, so that one prefill is in memory at a time.
        for prefill in {id(contender.prefill): contender.prefill for contender in contenders.values()}.values():
            for prompt in prompts:
                keys = [k for k in missing if contenders[k.method].prefill is prefill and k.length == prompt.context]
                runs: dict[RunKey, list[Run]] = {key: [] for key in keys}
                for _, key in interleave(keys, self._repeats):
                    runs[key].append(self._run(self._bench, contenders[key.method], key, prompt, tick))
                    if len(runs[key]) == self._repeats:
                        seconds = median(run.decode_seconds for run in runs[key])
                        ((new_tokens, verifications),), accepted = runs[key][0].token_counts, runs[key][0].accepted
                        yield AcceptanceRun(key, len(prompt.token_ids), new_tokens, verifications, accepted, seconds)
            prefill.clear()
            gc.collect()

    def _run(self, bench: Bench, contender: MethodContender, key: RunKey, prompt: Prompt, tick: Tick) -> Run:
        sampling = replace(self.settings.sampling, temperature=key.temperature)
        job = bench.make_job([prompt.token_ids], self.settings.max_tokens)
        job = RejectionSamplingJob(**vars(job)) if key.sampling == "standard" else job
        cached_prompts = contender.prefill.cache.tokens  # the token ids of each sequence whose KV is cached
        if cached_prompts:  # the cache computes tokens again that this list lacks
            cached_prompts[0] = cached_prompts[0][: max(0, len(prompt.token_ids) - RECOMPUTED_TOKENS)]
        job = replace(job, sampling=sampling, seed=job.seed + prompt.seed)
        words = f"{key.length:,} tokens, {key.method}, {format_temperature(key.temperature)}"
        return contender.decode_warm(job.announced(tick, words))


def format_temperature(temperature: float) -> str:
    """Returns ``greedy``, or a text such as ``T = 0.8``."""
    return f"T = {temperature:g}" if temperature else "greedy"
