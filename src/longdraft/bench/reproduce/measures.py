"""Measurements that fill a table, by its kind: the bench, needles, or ``bench quality``."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from longdraft.attention import dispatch
from longdraft.bench import report, tasks
from longdraft.bench.experiment import Tick, Unit
from longdraft.bench.needle import NeedleBench, TokenPrediction, accuracy, make_haystacks, perplexity
from longdraft.bench.papers.table import Column, Line
from longdraft.bench.peers import PEERS
from longdraft.bench.prompts import Prompt, PromptBatch
from longdraft.bench.quality import FULL, METHOD, VARIANT_DEFAULTS, QualityBench, QualitySettings, Variants
from longdraft.bench.quality import quality_figures as figures_of_texts
from longdraft.bench.records import from_json
from longdraft.bench.reproduce.scaled import (
    Figures,
    ScaledTable,
    TableEntry,
    TablePlan,
    UnitResult,
    add_draft,
    why_unavailable,
)
from longdraft.bench.reproduce.sources import MODULES, SampleSources
from longdraft.bench.run import BatchResult, Bench
from longdraft.bench.scores import rouge_l
from longdraft.bench.settings import REFERENCE, Settings, contender_name
from longdraft.bench.tables import ratio
from longdraft.drafts.kinds import KINDS
from longdraft.engine.sampler import Sampling
from longdraft.errors import CapabilityError, ContextError, PromptError
from longdraft.metrics import average
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner

Prompts = Mapping[str, Sequence[Prompt]]
"""The prompts of each column, by its name."""
Drafts = Mapping[str, Path]
"""Drafts by kind, that the user gave."""


# --- speed ---


def plan_speed(
    scaled: ScaledTable,
    loaded: LoadedModel,
    prompts: Prompts,
    drafts: Drafts,
    load_dequantized: Callable[[], LoadedModel] | None = None,
    progress: Progress | None = None,
) -> TablePlan:
    """A table that the bench fills: every line is a contender, every column prompts of one length and batch.

    Args:
        unpacked: as of :class:`~longdraft.bench.run.Bench`.

    Raises:
        CapabilityError: no line has the draft that it needs.
    """
    table = scaled.table
    fitting, notes = _fitting(scaled, TargetRunner(loaded.model), drafts)
    named = {line.name: contender_name(line.method, options) for line, _, options in fitting}
    baseline = named.get(table.baseline, table.baseline)
    paths: dict[str, dict[str, dict[str, Any]]] = {}  # attention path -> contender -> options
    for line, _, options in fitting:
        given = add_draft(line.method, options, drafts)
        paths.setdefault(line.attention, {})[contender_name(line.method, options)] = given
    for own in paths.values():
        if baseline in PEERS:
            own.setdefault(baseline, {})
    held: dict[tuple[str, float], Bench] = {}  # one at a time

    def measure(path: str, settings: Settings, group: PromptBatch, tick: Tick) -> UnitResult:
        key = path, settings.sampling.temperature
        with _forced(path):
            if key not in held:
                held.clear()
                gc.collect()
                held[key] = Bench(loaded, settings, progress, load_dequantized)
                held[key].warm_up(group[0])
            return asdict(held[key].measure(group, tick))

    def groups(path: str, t: float, column: Column) -> dict[str, PromptBatch]:
        """The prompts that are decoded together, by unit; columns that differ in options alone have the same units."""
        texts, n = prompts[column.name], column.batch
        about = f"{column.dataset}, {texts[0].context or 'whole'} tokens, batch {n}, T = {t:g}{path and ', ' + path}"
        return {f"{about}, {i + 1}": tuple(texts[i * n : (i + 1) * n]) for i in range(len(texts) // n)}

    units: dict[str, Unit] = {}
    for t, (path, options) in product(table.temperatures, paths.items()):
        settings = _settings(scaled, options, t)
        cold = sum(settings.cold or name == REFERENCE or name in PEERS for name in settings.contenders)
        ticks = cold + len(settings.contenders) * settings.repeats
        for name, group in (pair for column in table.columns for pair in groups(path, t, column).items()):
            units.setdefault(name, Unit(ticks, partial(measure, path, settings, group)))

    def rate(measured: Sequence[BatchResult], name: str) -> float | None:
        """New tokens a second as the paper counts and averages them; a batch's seconds are the median of its rounds."""
        pairs: list[tuple[float, float]] = []
        for m in measured:
            if runs := m.rounds.get(name):
                tokens, seconds = sum(n for n, _ in runs[0].counts), median(run.decode_seconds for run in runs)
                if table.includes_prefill:  # the reading is the method's own, or that of plain decoding
                    read = m.cold.get(name, m.cold[REFERENCE]).first_token_seconds
                    tokens, seconds = runs[0].new_tokens, seconds + (read or 0.0)
                pairs.append((tokens, seconds))
        return average(pairs, table.rate_average)

    def figures(entry: TableEntry, own: Sequence[UnitResult]) -> Figures:
        measured = [from_json(BatchResult, each) for each in own]
        own_rate, base_rate = rate(measured, entry.name), rate(measured, baseline)
        found = {
            **table.acceptance_stats(pair for m in measured for pair in m.counts(entry.name)),
            "tokens_per_second": own_rate,
            "speedup": ratio(own_rate, base_rate),
            **_parts([m.profiles[entry.name]["seconds"] for m in measured if entry.name in m.profiles]),
        }
        (row,) = report.rows([entry.name], measured)
        return {key: found.get(key) for key in (*table.figures, "speedup", "standard_error")}, row

    entries = [
        TableEntry(
            line, column, contender_name(line.method, options), options, list(groups(line.attention, t, column)), t
        )
        for t, (line, column, options) in product(table.temperatures, fitting)
    ]
    return TablePlan(units, entries, figures, notes)


def _settings(scaled: ScaledTable, options: Mapping[str, Mapping[str, Any]], temperature: float) -> Settings:
    return Settings(
        tuple(options),
        scaled.max_tokens,
        repeats=1 if scaled.small else 3,
        sampling=Sampling(temperature, foresee=False),  # the papers' drafts know no random numbers
        ignore_eos=scaled.small,
        cold=scaled.table.includes_prefill,
        contender_options={name: own for name, own in options.items() if own},
        plan=scaled.plan,
        profile=scaled.table.is_profiled,
    )


def _fitting(
    scaled: ScaledTable, runner: TargetRunner, drafts: Drafts
) -> tuple[list[tuple[Line, Column, dict[str, Any]]], list[str]]:
    """Lines, columns and options, and notes on lines that are left out since their draft is missing.

    At the small scale there are fewer chunks where the draft was trained for fewer, unless the column sweeps them.
    """
    table = scaled.table
    reasons: dict[tuple[str, str], str | None] = {}  # why a contender cannot run on a path; None: it can
    found: list[tuple[Line, Column, dict[str, Any]]] = []
    refused: dict[tuple[str, str], list[str]] = {}  # (line, reason) -> columns

    def reason_of(line: Line, options: Mapping[str, Any]) -> str | None:
        key = line.attention, contender_name(line.method, options)
        if key not in reasons:
            path, shape = line.attention, runner.kv_shape
            missing = dispatch.why_unavailable(path, runner.device, shape.dtype, shape.head_dim) if path else None
            reasons[key] = why_unavailable(line.method, add_draft(line.method, options, drafts), runner) or missing
        return reasons[key]

    for line, column in table.cells():
        options = scaled.options(line, column)
        fixed = not scaled.small or "chunks" in column.options
        while (reason := reason_of(line, options)) and not fixed and options.get("chunks", 1) > 1:
            options = {**options, "chunks": options["chunks"] // 2}
        if reason is None:
            found.append((line, column, options))
        else:
            refused.setdefault((line.name, reason), []).append(column.name)
    notes = []
    for (name, reason), columns in refused.items():
        everywhere = len(columns) == sum(line.name == name for line, _ in table.cells())
        where = "" if everywhere else f" in {', '.join(columns)}"
        notes.append(f"{name} is left out{where}: {reason.rstrip('.')}.")
    if not found:
        raise CapabilityError(f"Nothing of {table.heading} can run: {' '.join(notes)}")
    return found, notes


@contextmanager
def _forced(path: str) -> Iterator[None]:
    """Forces an attention path on models that are hosted meanwhile; empty: none."""
    before = os.environ.get(dispatch.ENVIRONMENT_VARIABLE)
    if path:
        os.environ[dispatch.ENVIRONMENT_VARIABLE] = path
    try:
        yield
    finally:
        os.environ.pop(dispatch.ENVIRONMENT_VARIABLE, None)
        if before is not None:
            os.environ[dispatch.ENVIRONMENT_VARIABLE] = before


def _parts(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Parts of a round in milliseconds, means of the prompts."""
    if not seconds:
        return {}
    parts = {f"{part}_ms": 1000 * mean(each[part] for each in seconds) for part in seconds[0]}
    return {**parts, "verify_ms": parts["attention_ms"] + parts["forward_ms"]}


# --- needles ---


def plan_needles(scaled: ScaledTable, loaded: LoadedModel, sources: SampleSources, drafts: Drafts) -> TablePlan:
    """A table of how well drafters foresee a sentence that lies in a long text. A line's method is one of their views.

    Raises:
        CapabilityError: a view's draft is missing.
        ContextError: the haystacks do not fit the model's context.
        PromptError: the paper's scale without a file.
    """
    (column,) = scaled.table.columns
    views = {line.name: (line.method, scaled.options(line, column)) for line in scaled.table.lines}
    asked = NeedleBench(loaded, views, {kind: KINDS[kind].load(own) for kind, own in drafts.items()})
    tokens, limit = scaled.prompt_tokens(column) or 0, asked.runner.context_length
    if tokens > limit and not scaled.small:
        raise ContextError(
            f"Haystacks have {tokens:,} tokens, and the model's context is {limit:,}: take --scale small."
        )
    length = min(tokens, asked.max_haystack_tokens)
    if given := sources.files.get(column.dataset):
        file, of = Path(given).expanduser(), ""
    elif sources.stand_ins:
        file, of = tasks.module_source(MODULES[0]), " of Python's library"
    else:
        raise PromptError(
            f"Needles lie in a long text: give one, plain or JSONL, as --data {column.dataset}=FILE (a book of PG-19)."
        )

    def measure(haystack: Prompt, tick: Tick) -> UnitResult:
        return {"tokens": asked.measure(haystack, tick), "context_tokens": len(haystack.token_ids)}

    def figures(entry: TableEntry, own: Sequence[UnitResult]) -> Figures:
        tokens = [TokenPrediction(*each) for unit in own for each in unit["tokens"][entry.name]]
        shown = {"accuracy": accuracy(tokens), "perplexity": perplexity(tokens)}
        return shown, {
            "view": contender_name(entry.line.method, entry.options),
            "context_tokens": round(mean(unit["context_tokens"] for unit in own)),
            "haystacks": len(own),
            "tokens": len(tokens),
            **shown,
        }

    found = make_haystacks(file, length, loaded.tokenizer, scaled.prompts or 1, **scaled.template_kwargs)
    units = {
        f"haystack {i}, needle at {each.sample.needles[0][0]:g}": Unit(len(views), partial(measure, each))
        for i, each in enumerate(found, 1)
    }
    entries = [TableEntry(line, column, line.name, views[line.name][1], list(units)) for line in scaled.table.lines]
    differs = {column.name: [f"haystacks of {length:,} tokens", f"the text is {file.name}{of}"]}
    return TablePlan(units, entries, figures, differences=differs)


# --- quality ---


def plan_quality(scaled: ScaledTable, loaded: LoadedModel, prompts: Prompts, drafts: Drafts) -> TablePlan:
    """A table that ``bench quality`` fills: texts of partial verification beside those of full verification.

    Raises:
        CapabilityError: the drafter's draft is missing, or rouge-score is not installed.
    """
    rouge_l()  # missing, it is missed before anything is measured
    table = scaled.table
    names: dict[str, str] = {}
    variants: Variants = {}
    common: dict[str, Any] = {}
    for line in table.lines:
        own = scaled.options(line, table.columns[0])
        common |= {name: own.pop(name) for name in ("drafter",) if name in own}
        names[line.name] = FULL if line.method == FULL else contender_name(METHOD, own := {**VARIANT_DEFAULTS, **own})
        variants |= {} if line.method == FULL else {names[line.name]: own}
    options = add_draft(METHOD, common, drafts)
    quality = QualityBench(loaded, QualitySettings(variants, scaled.max_tokens, scaled.small, options=options))
    notes = quality.notes_on_short_prompts(
        [len(prompt.token_ids) + scaled.max_tokens for own in prompts.values() for prompt in own]
    )
    units = {
        column.name: {f"{column.name}, prompt {i}": each for i, each in enumerate(prompts[column.name], 1)}
        for column in table.columns
    }

    def figures(entry: TableEntry, own: Sequence[UnitResult]) -> Figures:
        runs = [unit["runs"][entry.name] for unit in own]
        found = figures_of_texts(runs)
        shown = {
            "rouge_l": 100 * found["rouge_l_mean"],
            "score": None if found["score"] is None else 100 * found["score"],
            **table.acceptance_stats((run["tokens"] - 1, run["rounds"]) for run in runs),
            "tokens_per_second": found["tokens_per_second"],
        }
        return shown, {
            "method": entry.name,
            "dataset": entry.column.dataset,
            "context_tokens": round(median(unit["context_tokens"] for unit in own)),
            **found,
        }

    entries = [
        TableEntry(line, column, names[line.name], scaled.options(line, column), list(units[column.name]))
        for column, line in product(table.columns, table.lines)
    ]
    measured = {
        name: Unit(len(quality.names), partial(quality.measure, prompt))
        for own in units.values()
        for name, prompt in own.items()
    }
    return TablePlan(measured, entries, figures, notes)
