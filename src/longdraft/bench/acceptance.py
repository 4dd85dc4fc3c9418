"""Acceptance against context length: the same texts, cut to several lengths, decoded with each draft.

Lengths beyond the target's trained context are measured on the target stretched by YaRN. A text is prefilled once, at
its greatest length; shorter cuts, all methods and all temperatures start from this KV. Trees have the methods' default
shapes: there is no planner.
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
from longdraft.methods import METHODS
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner

FORMAT, VERSION = "longdraft-acceptance", 1
# So many last tokens of a prompt are computed again in every run: some drafters choose their view by the queries of
# these tokens, and a KV cache holds no queries.
RECOMPUTED_TOKENS = 64
# These methods also run the target on a part of its KV, between drafting and verification. Such forwards do not count
# as verifications, so accepted lengths of these methods cannot be compared with those of other methods.
PARTIAL_METHODS = ("tokenswift", "triforce")


@dataclass(frozen=True)
class RunSettings:
    """The settings that differ between the runs of a file; the key of a run.

    Attributes:
        options: the method's options as JSON.
        draft: fingerprint of the method's draft; empty: no draft.
        rope_factor: YaRN factor of the target; None: not stretched.
        sample: origin of the text, file and line.
        prompt: fingerprint of the prompt's tokens.
        sampling: a :data:`~longdraft.bench.data.SamplingScheme`; "coupled" for greedy decoding.
    """

    method: str
    options: str
    draft: str
    temperature: float
    length: int
    rope_factor: float | None
    dataset: str
    sample: str
    prompt: str
    sampling: str = "coupled"


@dataclass(frozen=True)
class AcceptanceRun:
    """The measured run of a prompt.

    Attributes:
        asked: the settings of the run.
        new_tokens: emitted tokens without the prefill's token.
        verifications: the target forwards that emitted them.
        accepted: for each verification, how many drafted tokens were accepted, and how many ``max_tokens`` allowed.
        seconds: decode seconds, the median of the repeats. In files of old versions: None, or the fastest repeat's.
    """

    asked: RunSettings
    prompt_tokens: int
    new_tokens: int
    verifications: int
    accepted: tuple[tuple[int, int], ...]
    seconds: float | None = field(default=None, compare=False)


AcceptanceStep = Step[RunSettings, AcceptanceRun]


def open_records(path: Path, settings: Settings, model: Mapping[str, Any]) -> RecordFile[AcceptanceRun]:
    """Opens a file of runs. Other methods, lengths, temperatures and prompts may be added to it later.

    Args:
        model: the header's entry for the model.

    Raises:
        LongdraftError: see :class:`~longdraft.bench.records.RecordFile`.
    """
    shared = {name: getattr(settings, name) for name in ("max_tokens", "seed", "ignore_eos", "raw")}
    if not settings.sampling.foresee:
        shared["foresee"] = False
    content = {"settings": shared, "model": model, "versions": machine.versions()}
    return RecordFile(path, make_header(FORMAT, VERSION, content), AcceptanceRun)


def default_methods(target: TargetRunner) -> tuple[str, ...]:
    """The methods for which the package has a draft of this target, without :data:`PARTIAL_METHODS`."""
    try:
        description = target.shared_parts.description
    except UnsupportedModelError:
        return ()
    drafting = [method for method in METHODS.values() if method.needs_draft and method.name not in PARTIAL_METHODS]
    return tuple(m.name for m in drafting if shipped.find_draft(description, m.draft_kind) is not None)


def lengths_by_rope_factor(lengths: Sequence[int], context: int) -> dict[float | None, list[int]]:
    """Lengths (tokens) by the YaRN factor that they need, a power of two; None: within the context."""
    lengths_by_factor: dict[float | None, list[int]] = {}
    for length in sorted(set(lengths)):
        factor = None if length <= context else 2.0 ** math.ceil(math.log2(length / context))
        lengths_by_factor.setdefault(factor, []).append(length)
    return lengths_by_factor


class AcceptanceBench:
    """Methods on a target, which is stretched for lengths beyond its context. One target is in memory at a time.

    Args:
        load: a YaRN factor -> the target, stretched by it on top of the user's settings; None: not stretched.
        settings: a target -> the bench's settings.
        name: the model's name as the user wrote it.
        progress: called with a line of text before a step that takes long.
        repeats: repeats of each run; the run's seconds are their median.
        sampling: how tokens are accepted at T > 0.

    Attributes:
        context_length: the target's context (tokens), not stretched by the bench.
        model_entry: the target's entry in the header of a file.
        notes: remarks on texts and lengths that are not as requested.

    Raises:
        CapabilityError: a method's draft is missing.
        CheckpointError: a draft was made for another target.
    """

    def __init__(
        self,
        load: Callable[[float | None], LoadedModel],
        settings: Callable[[TargetRunner], Settings],
        temperatures: Sequence[float],
        name: str,
        progress: Progress | None = None,
        repeats: int = 1,
        sampling: SamplingScheme = "coupled",
    ) -> None:
        self._load, self._temperatures, self._repeats, self._sampling = load, temperatures, repeats, sampling
        self.notes: list[str] = []
        self._factor: float | None = None
        loaded = load(None)
        target = TargetRunner(loaded.model)
        self.settings, self.tokenizer = settings(target), loaded.tokenizer
        self.context_length, self.model_entry = target.context_length, model_entry(target, name)
        self._bench: Bench | None = Bench(loaded, self.settings, progress=progress)
        contenders = self._bench.methods.items()
        self._drafts = {name: "" if c.draft is None else fingerprint(c.draft) for name, c in contenders}

    def _load_stretched(self, factor: float | None) -> None:
        """Loads the target with this YaRN factor. If that fails, adds a note and sets ``_bench`` to None."""
        if factor != self._factor:
            self._factor, self._bench = factor, None
            gc.collect()
            try:
                self._bench = Bench(self._load(factor), self.settings)
            except CapabilityError as error:
                self.notes.append(f"Lengths that need a factor of {factor or 1:g} are left out: {error}")

    def steps(self, samples: Sequence[Sample], lengths: Sequence[int], short: ShortTextPolicy) -> list[AcceptanceStep]:
        """A step for each text and YaRN factor.

        Raises:
            ContextError: the target has no room for new tokens.
            PromptError: every text is shorter than all of the lengths.
        """
        s = self.settings
        steps: list[AcceptanceStep] = []
        for factor, factor_lengths in lengths_by_rope_factor(lengths, self.context_length).items():
            context = int(self.context_length * (factor or 1.0))
            if context <= s.max_tokens:
                raise ContextError(f"{s.max_tokens:,} new tokens fill the context of {context:,}: lower --max-tokens.")
            by_sample: dict[Sample, list[Prompt]] = {}
            for length in factor_lengths:
                prompts, notes = prompts_of_length(
                    samples, length, context - s.max_tokens, self.tokenizer, short, s.raw, **s.template_kwargs
                )
                self.notes += notes
                for prompt in prompts:
                    by_sample.setdefault(prompt.sample, []).append(prompt)
            stretched = "" if factor is None else f", the model stretched {factor:g} times"
            for sample, prompts in by_sample.items():
                prompts.reverse()  # the longest first: shorter prompts start from its KV
                name, measure = f"{Path(sample.origin).name}{stretched}", partial(self._measure, prompts, factor)
                steps.append(Step(name, self._run_settings(prompts, factor), measure, self._repeats))
        if not steps:
            raise PromptError(" ".join(self.notes))
        return steps

    def _run_settings(self, prompts: Sequence[Prompt], factor: float | None) -> list[RunSettings]:
        """The settings of all runs of these prompts, on the target with this YaRN factor."""
        options = {n: json.dumps(jsonable(self.settings.options(n)), sort_keys=True) for n in self.settings.methods}
        return [
            RunSettings(
                name, options[name], self._drafts[name], temperature, p.context or 0, factor,
                p.sample.dataset, p.sample.origin, p.digest, self._sampling if temperature else "coupled",
            )
            for p, name, temperature in product(prompts, self.settings.methods, self._temperatures)
        ]  # fmt: skip

    def _measure(
        self, prompts: Sequence[Prompt], factor: float | None, missing: Collection[RunSettings], tick: Tick
    ) -> Iterator[AcceptanceRun]:
        """The missing runs of a sample's prompts; none if the target cannot be stretched by the factor."""
        self._load_stretched(factor)
        if self._bench is None:
            return
        if self._repeats > 1:  # otherwise seconds include one-time work
            self._bench.warm_up(prompts[0])
        methods = {name: c for name, c in self._bench.methods.items() if name in self.settings.methods}
        # Methods that share a prefill run one after the other, so that one prefill is in memory at a time.
        for prefill in {id(c.prefill): c.prefill for c in methods.values()}.values():
            for prompt in prompts:
                group = [s for s in missing if methods[s.method].prefill is prefill and s.length == prompt.context]
                runs: dict[RunSettings, list[Run]] = {settings: [] for settings in group}
                for _, settings in interleave(group, self._repeats):
                    tick(f"{settings.length:,} tokens, {settings.method}, {format_temperature(settings.temperature)}")
                    runs[settings].append(self._run(self._bench, methods[settings.method], settings, prompt))
                    if len(runs[settings]) == self._repeats:
                        run, seconds = runs[settings][0], median(run.decode_seconds for run in runs[settings])
                        yield AcceptanceRun(settings, len(prompt.token_ids), *run.counts[0], run.accepted, seconds)
            prefill.clear()
            gc.collect()

    def _run(self, bench: Bench, method: MethodContender, settings: RunSettings, prompt: Prompt) -> Run:
        sampling = replace(self.settings.sampling, temperature=settings.temperature)
        job = bench.make_job([prompt.token_ids], self.settings.max_tokens)
        job = RejectionSamplingJob(**vars(job)) if settings.sampling == "standard" else job
        cached = method.prefill.cache.tokens
        if cached:  # a shorter record of its tokens makes the cache recompute the rest
            cached[0] = cached[0][: max(0, len(prompt.token_ids) - RECOMPUTED_TOKENS)]
        return method.decode_warm(replace(job, sampling=sampling, seed=job.seed + prompt.seed))


def format_temperature(temperature: float) -> str:
    """``greedy``, or ``T = 0.8``."""
    return f"T = {temperature:g}" if temperature else "greedy"
