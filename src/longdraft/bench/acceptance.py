"""Acceptance against context length: the same texts, cut to each of several lengths, decoded with each draft.

A length within the target's trained context is measured on the target as it is, a longer one on the target stretched by
YaRN. A text is read once a target, at its longest; all that is shorter, and every method and temperature, starts from
that KV. Trees are the methods' own: no planner.
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
# The last tokens of a prompt are read again in every run: some drafters choose their view by these tokens' queries,
# which a kept KV does not have.
RECOMPUTED_TOKENS = 64
# These run the target on a part of its KV too, between draft and verification. Such forwards are no verifications, so
# their accepted lengths cannot be compared.
PARTIAL_METHODS = ("tokenswift", "triforce")


@dataclass(frozen=True)
class RunSettings:
    """Settings of one run that differ within a file.

    Attributes:
        options: the method's, as JSON.
        draft: fingerprint of its draft, empty if it has none.
        rope_factor: YaRN factor of the target; None: as it is.
        sample, prompt: origin of the text, and a fingerprint of its tokens.
        sampling: of :data:`Scheme`; "coupled" of greedy text.
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
    """One prompt, decoded once.

    Attributes:
        new_tokens: without the prefill's token.
        verifications: target forwards that gave them.
        accepted: for each verification, accepted drafted tokens, and how many the token budget had room for.
        seconds: decode seconds, the median of the runs; None, or of the fastest run, in files of earlier versions.
    """

    asked: RunSettings
    prompt_tokens: int
    new_tokens: int
    verifications: int
    accepted: tuple[tuple[int, int], ...]
    seconds: float | None = field(default=None, compare=False)


def open_records(path: Path, settings: Settings, model: Mapping[str, Any]) -> RecordFile[AcceptanceRun]:
    """A file of runs, to which other methods, lengths, temperatures and prompts may be added later.

    Args:
        model: the header's entry for it.

    Raises:
        ConfigError: the file's runs were made with another model, other versions or other settings.
        CheckpointError: it cannot be read or written, or is no such file.
    """
    fixed = {name: getattr(settings, name) for name in ("max_tokens", "seed", "ignore_eos", "raw")}
    if not settings.sampling.foresee:
        fixed["foresee"] = False
    content = {"settings": fixed, "model": model, "versions": machine.versions()}
    return RecordFile(path, make_header(FORMAT, VERSION, content), AcceptanceRun)


def default_methods(target: TargetRunner) -> tuple[str, ...]:
    """The methods whose draft comes with the package for this target, but for :data:`PARTIAL_METHODS`."""
    try:
        description = target.shared_parts.description
    except UnsupportedModelError:
        return ()
    drafting = [method for method in METHODS.values() if method.needs_draft and method.name not in PARTIAL_METHODS]
    return tuple(m.name for m in drafting if shipped.find_draft(description, m.draft_kind) is not None)


def lengths_by_rope_factor(lengths: Sequence[int], context: int) -> dict[float | None, list[int]]:
    """The lengths (tokens) that need each YaRN factor, a power of two; None: those that the context holds."""
    found: dict[float | None, list[int]] = {}
    for length in sorted(set(lengths)):
        factor = None if length <= context else 2.0 ** math.ceil(math.log2(length / context))
        found.setdefault(factor, []).append(length)
    return found


class AcceptanceBench:
    """The methods on a target, which is stretched for the lengths that need it. One target is held at a time.

    Args:
        load: reads the target, stretched by a further YaRN factor; None: as the user wants it.
        settings: returns the settings for a target.
        name: the model's name as the user gave it.
        repeats: runs of each, of whose seconds the median counts.
        progress: called with a line of text before something long.
        sampling: of sampled text.

    Attributes:
        context: tokens that the target holds as it was first loaded.
        model: the target's entry in a file's header.
        notes: remarks on texts and lengths that differ from what was asked for.

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
        ours = self._bench.methods.items()
        self._drafts = {name: "" if c.draft is None else fingerprint(c.draft) for name, c in ours}

    def _stretch(self, factor: float | None) -> None:
        """Replaces the target with the one of this YaRN factor; where it cannot be stretched, a note says so."""
        if factor != self._factor:
            self._factor, self._bench = factor, None
            gc.collect()
            try:
                self._bench = Bench(self._load(factor), self.settings)
            except CapabilityError as error:
                self.notes.append(f"Lengths that need a factor of {factor or 1:g} are left out: {error}")

    def steps(
        self, samples: Sequence[Sample], lengths: Sequence[int], short: ShortTextPolicy
    ) -> list[Step[RunSettings, AcceptanceRun]]:
        """A step for each text and YaRN factor.

        Raises:
            ContextError: the target has no room for new tokens.
            PromptError: no text is as long as any of the lengths.
        """
        own = self.settings
        steps: list[Step[RunSettings, AcceptanceRun]] = []
        for factor, some in lengths_by_rope_factor(lengths, self.context_length).items():
            whole = int(self.context_length * (factor or 1.0))
            if whole <= own.max_tokens:
                raise ContextError(f"A context of {whole:,} tokens has no room for {own.max_tokens:,} new ones.")
            work: dict[Sample, list[Prompt]] = {}
            for length in some:
                room = whole - own.max_tokens
                found, said = prompts_of_length(samples, length, room, self.tokenizer, short, own.raw, **own.asked)
                self.notes += said
                for text in found:
                    work.setdefault(text.sample, []).append(text)
            stretched = "" if factor is None else f", the model stretched {factor:g} times"
            for sample, found in work.items():
                found.reverse()  # the longest text comes first
                what, measure = f"{Path(sample.origin).name}{stretched}", partial(self._measure, found, factor)
                steps.append(Step(what, self._asked(found, factor), measure, self._repeats))
        if not steps:
            raise PromptError(" ".join(self.notes))
        return steps

    def _asked(self, own: Sequence[Prompt], factor: float | None) -> list[RunSettings]:
        """The runs of a row's prompts, on the target with that YaRN factor."""
        options = {n: json.dumps(jsonable(self.settings.options(n)), sort_keys=True) for n in self.settings.methods}
        return [
            RunSettings(
                name, options[name], self._drafts[name], temperature, text.context or 0, factor,
                text.sample.dataset, text.sample.origin, text.digest, self._sampling if temperature else "coupled",
            )
            for text, name, temperature in product(own, self.settings.methods, self._temperatures)
        ]  # fmt: skip

    def _measure(
        self, own: Sequence[Prompt], factor: float | None, missing: Collection[RunSettings], tick: Tick
    ) -> Iterator[AcceptanceRun]:
        """The missing runs of a row's prompts; none if the target cannot be stretched by the factor."""
        self._stretch(factor)
        if self._bench is None:
            return
        if self._repeats > 1:  # what is done only once would count among two runs
            self._bench.warm_up(own[0])
        methods = {name: c for name, c in self._bench.methods.items() if name in self.settings.methods}
        for kept in {id(c.prefill): c.prefill for c in methods.values()}.values():  # each reads the texts once
            for text in own:
                asked = [a for a in missing if methods[a.method].prefill is kept and a.length == text.context]
                runs: dict[RunSettings, list[Run]] = {each: [] for each in asked}
                for _, each in interleave(asked, self._repeats):
                    tick(f"{each.length:,} tokens, {each.method}, {format_temperature(each.temperature)}")
                    runs[each].append(self._run(self._bench, methods[each.method], each, text))
                    if len(runs[each]) == self._repeats:
                        run, seconds = runs[each][0], median(run.decode_seconds for run in runs[each])
                        yield AcceptanceRun(each, len(text.token_ids), *run.counts[0], run.accepted, seconds)
            kept.clear()
            gc.collect()

    def _run(self, bench: Bench, method: MethodContender, asked: RunSettings, text: Prompt) -> Run:
        sampling = replace(self.settings.sampling, temperature=asked.temperature)
        job = bench.make_job([text.token_ids], self.settings.max_tokens)
        job = RejectionSamplingJob(**vars(job)) if asked.sampling == "standard" else job
        cached = method.prefill.cache.tokens
        if cached:
            cached[0] = cached[0][: max(0, len(text.token_ids) - RECOMPUTED_TOKENS)]
        return method.decode_warm(replace(job, sampling=sampling, seed=job.seed + text.seed))


def format_temperature(temperature: float) -> str:
    """A temperature in words."""
    return f"T = {temperature:g}" if temperature else "greedy"
