"""Plans that measure a paper's table: ``plan_speed``, ``plan_needles`` or ``plan_quality``, by the table's kind."""

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
from longdraft.bench import quality, report, tasks
from longdraft.bench.experiment import Tick, Unit
from longdraft.bench.needle import NeedleBench, TokenPrediction, accuracy, make_haystacks, perplexity
from longdraft.bench.papers.table import Column, Line
from longdraft.bench.peers import PEERS
from longdraft.bench.prompts import Prompt, PromptBatch
from longdraft.bench.quality import FULL, METHOD, QualityBench, QualitySettings
from longdraft.bench.records import from_json
from longdraft.bench.reproduce.scaled import Figures, ScaledTable, TableEntry, TablePlan, UnitResult, add_draft, refusal
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
"""A column's name -> its prompts."""
Drafts = Mapping[str, Path]
"""Kind of draft -> the user's folder or file."""


def plan_speed(
    scaled: ScaledTable,
    loaded: LoadedModel,
    prompts: Prompts,
    drafts: Drafts,
    load_dequantized: Callable[[], LoadedModel] | None = None,
    progress: Progress | None = None,
) -> TablePlan:
    """The plan of a table of speed. A line is a contender of ``bench``, a column a length of prompts and a batch size.

    Args:
        load_dequantized: see :class:`~longdraft.bench.run.Bench`.

    Raises:
        CapabilityError: no line can run.
    """
    table = scaled.table
    available, notes = _available_cells(scaled, TargetRunner(loaded.model), drafts)
    contenders = {line.name: contender_name(line.method, options) for line, _, options in available}
    baseline = contenders.get(table.baseline, table.baseline)
    paths: dict[str, dict[str, dict[str, Any]]] = {}  # attention path -> contender -> options
    for line, _, options in available:
        by_contender = paths.setdefault(line.attention, {})
        by_contender[contender_name(line.method, options)] = add_draft(line.method, options, drafts)
    for by_contender in paths.values():
        if baseline in PEERS:
            by_contender.setdefault(baseline, {})
    benches: dict[tuple[str, float], Bench] = {}  # (attention path, temperature) -> bench; the last one only

    def measure(path: str, settings: Settings, batch: PromptBatch, tick: Tick) -> UnitResult:
        key = path, settings.sampling.temperature
        with _forced_attention(path):
            if key not in benches:
                benches.clear()
                gc.collect()
                benches[key] = Bench(loaded, settings, progress, load_dequantized)
                benches[key].warm_up(batch[0])
            return asdict(benches[key].measure(batch, tick))

    def batches(path: str, t: float, column: Column) -> dict[str, PromptBatch]:
        """Batches by the name of their unit. Columns that differ only in options share their units."""
        group, n = prompts[column.name], column.batch
        name = f"{column.dataset}, {group[0].context or 'whole'} tokens, batch {n}, T = {t:g}{path and ', ' + path}"
        return {f"{name}, {i + 1}": tuple(group[i * n : (i + 1) * n]) for i in range(len(group) // n)}

    units: dict[str, Unit] = {}
    for t, (path, by_contender) in product(table.temperatures, paths.items()):
        settings = _settings(scaled, by_contender, t)
        cold = sum(settings.cold or name == REFERENCE or name in PEERS for name in settings.contenders)
        ticks = cold + len(settings.contenders) * settings.repeats
        for name, batch in (pair for column in table.columns for pair in batches(path, t, column).items()):
            units.setdefault(name, Unit(ticks, partial(measure, path, settings, batch)))

    def rate(results: Sequence[BatchResult], name: str) -> float | None:
        """New tokens/s, counted and averaged by the paper's rules; a batch's seconds are the median of its runs."""
        pairs: list[tuple[float, float]] = []
        for result in results:
            if runs := result.rounds.get(name):
                tokens, seconds = sum(n for n, _ in runs[0].counts), median(run.decode_seconds for run in runs)
                if table.includes_prefill:  # methods without a cold run share the prefill of ar
                    prefill = result.cold.get(name, result.cold[REFERENCE]).first_token_seconds
                    tokens, seconds = runs[0].new_tokens, seconds + (prefill or 0.0)
                pairs.append((tokens, seconds))
        return average(pairs, table.rate_average)

    def figures(entry: TableEntry, unit_results: Sequence[UnitResult]) -> Figures:
        results = [from_json(BatchResult, unit) for unit in unit_results]
        entry_rate, base_rate = rate(results, entry.name), rate(results, baseline)
        values = {
            **table.acceptance_stats(pair for result in results for pair in result.counts(entry.name)),
            "tokens_per_second": entry_rate,
            "speedup": ratio(entry_rate, base_rate),
            **_part_ms([r.profiles[entry.name]["seconds"] for r in results if entry.name in r.profiles]),
        }
        (row,) = report.rows([entry.name], results)
        return {key: values.get(key) for key in (*table.figures, "speedup", "standard_error")}, row

    entries = []
    for t, (line, column, options) in product(table.temperatures, available):
        unit_names = list(batches(line.attention, t, column))
        entries.append(TableEntry(line, column, contender_name(line.method, options), options, unit_names, t))
    return TablePlan(units, entries, figures, notes)


def _settings(scaled: ScaledTable, options: Mapping[str, Mapping[str, Any]], temperature: float) -> Settings:
    return Settings(
        tuple(options),
        scaled.max_tokens,
        repeats=1 if scaled.small else 3,
        sampling=Sampling(temperature, foresee=False),  # in the papers drafts do not see the sampling noise
        ignore_eos=scaled.small,
        cold=scaled.table.includes_prefill,
        contender_options={name: x for name, x in options.items() if x},
        plan=scaled.plan,
        profile=scaled.table.is_profiled,
    )


def _available_cells(
    scaled: ScaledTable, runner: TargetRunner, drafts: Drafts
) -> tuple[list[tuple[Line, Column, dict[str, Any]]], list[str]]:
    """The cells (line, column, options) that can run, and notes on cells that cannot, such as for a missing draft.

    At the small scale the number of chunks is halved until it fits the draft, unless the column sweeps that number.
    """
    table = scaled.table
    reasons: dict[tuple[str, str], str | None] = {}  # (path, contender) -> why it cannot run; None: it can
    available: list[tuple[Line, Column, dict[str, Any]]] = []
    refused: dict[tuple[str, str], list[str]] = {}  # (line, reason) -> columns

    def reason_of(line: Line, options: Mapping[str, Any]) -> str | None:
        key = line.attention, contender_name(line.method, options)
        if key not in reasons:
            path, shape = line.attention, runner.kv_shape
            missing = dispatch.why_unavailable(path, runner.device, shape.dtype, shape.head_dim) if path else None
            reasons[key] = refusal(line.method, add_draft(line.method, options, drafts), runner) or missing
        return reasons[key]

    for line, column in table.cells():
        options = scaled.options(line, column)
        chunks_fixed = not scaled.small or "chunks" in column.options
        while (reason := reason_of(line, options)) and not chunks_fixed and options.get("chunks", 1) > 1:
            options = {**options, "chunks": options["chunks"] // 2}
        if reason is None:
            available.append((line, column, options))
        else:
            refused.setdefault((line.name, reason), []).append(column.name)
    notes = []
    for (name, reason), columns in refused.items():
        all_columns = len(columns) == sum(line.name == name for line, _ in table.cells())
        where = "" if all_columns else f" in {', '.join(columns)}"
        notes.append(f"{name} is left out{where}: {reason.rstrip('.')}.")
    if not available:
        raise CapabilityError(f"Nothing of {table.heading} can run: {' '.join(notes)}")
    return available, notes


@contextmanager
def _forced_attention(path: str) -> Iterator[None]:
    """Runners that are made inside the context use this attention path; empty: the default path."""
    previous = os.environ.get(dispatch.ENVIRONMENT_VARIABLE)
    if path:
        os.environ[dispatch.ENVIRONMENT_VARIABLE] = path
    try:
        yield
    finally:
        os.environ.pop(dispatch.ENVIRONMENT_VARIABLE, None)
        if previous is not None:
            os.environ[dispatch.ENVIRONMENT_VARIABLE] = previous


def _part_ms(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean milliseconds of a round's parts, from each prompt's seconds."""
    if not seconds:
        return {}
    parts = {f"{part}_ms": 1000 * mean(profile[part] for profile in seconds) for part in seconds[0]}
    return {**parts, "verify_ms": parts["attention_ms"] + parts["forward_ms"]}


def plan_needles(scaled: ScaledTable, loaded: LoadedModel, sources: SampleSources, drafts: Drafts) -> TablePlan:
    """The plan of a table of needles: how well drafters predict a sentence of a long text. A line is a drafter's view.

    Raises:
        CapabilityError: a view's draft is missing.
        ContextError: the haystacks do not fit the model's context.
        PromptError: the paper's scale needs a text, and the user gave none.
    """
    (column,) = scaled.table.columns
    views = {line.name: (line.method, scaled.options(line, column)) for line in scaled.table.lines}
    bench = NeedleBench(loaded, views, {kind: KINDS[kind].load(path) for kind, path in drafts.items()})
    tokens, limit = scaled.prompt_tokens(column) or 0, bench.runner.context_length
    if tokens > limit and not scaled.small:
        raise ContextError(f"Haystacks of {tokens:,} tokens exceed the context of {limit:,}: take --scale small.")
    length = min(tokens, bench.max_haystack_tokens)
    if path := sources.files.get(column.dataset):
        file, origin = Path(path).expanduser(), ""
    elif sources.stand_ins:
        file, origin = tasks.module_source(MODULES[0]), " of Python's library"
    else:
        raise PromptError(
            f"Needles need a long text: give one, plain or JSONL, as --data {column.dataset}=FILE (a book of PG-19)."
        )

    def measure(haystack: Prompt, tick: Tick) -> UnitResult:
        return {"tokens": bench.measure(haystack, tick), "context_tokens": len(haystack.token_ids)}

    def figures(entry: TableEntry, results: Sequence[UnitResult]) -> Figures:
        predictions = [TokenPrediction(*x) for result in results for x in result["tokens"][entry.name]]
        values = {"accuracy": accuracy(predictions), "perplexity": perplexity(predictions)}
        return values, {
            "view": contender_name(entry.line.method, entry.options),
            "context_tokens": round(mean(result["context_tokens"] for result in results)),
            "haystacks": len(results),
            "tokens": len(predictions),
            **values,
        }

    haystacks = make_haystacks(file, length, loaded.tokenizer, scaled.prompts or 1, **scaled.template_kwargs)
    units = {
        f"haystack {i}, needle at {haystack.sample.needles[0][0]:g}": Unit(len(views), partial(measure, haystack))
        for i, haystack in enumerate(haystacks, 1)
    }
    entries = [TableEntry(line, column, line.name, views[line.name][1], list(units)) for line in scaled.table.lines]
    differences = {column.name: [f"haystacks of {length:,} tokens", f"the text is {file.name}{origin}"]}
    return TablePlan(units, entries, figures, differences=differences)


def plan_quality(scaled: ScaledTable, loaded: LoadedModel, prompts: Prompts, drafts: Drafts) -> TablePlan:
    """The plan of a table of ``bench quality``: partial verification's output against full verification's.

    Raises:
        CapabilityError: the drafter's draft is missing, or rouge-score is not installed.
    """
    rouge_l()  # raises now, not after the first measurement
    table = scaled.table
    names: dict[str, str] = {}  # line -> contender
    variants: quality.Variants = {}
    common: dict[str, Any] = {}
    for line in table.lines:
        names[line.name] = FULL
        line_options = scaled.options(line, table.columns[0])
        common |= {name: line_options.pop(name) for name in ("drafter",) if name in line_options}
        if line.method != FULL:
            variant = {**quality.VARIANT_DEFAULTS, **line_options}
            names[line.name] = contender_name(METHOD, variant)
            variants[names[line.name]] = variant
    options = add_draft(METHOD, common, drafts)
    bench = QualityBench(loaded, QualitySettings(variants, scaled.max_tokens, scaled.small, options=options))
    lengths = [len(prompt.token_ids) + scaled.max_tokens for group in prompts.values() for prompt in group]
    units_of = {
        column.name: {
            f"{column.name}, prompt {i}": Unit(len(bench.names), partial(bench.measure, prompt))
            for i, prompt in enumerate(prompts[column.name], 1)
        }
        for column in table.columns
    }

    def figures(entry: TableEntry, results: Sequence[UnitResult]) -> Figures:
        runs = [result["runs"][entry.name] for result in results]
        row = quality.quality_figures(runs)
        as_published = {
            "rouge_l": 100 * row["rouge_l_mean"],
            "score": None if row["score"] is None else 100 * row["score"],
            **table.acceptance_stats((run["tokens"] - 1, run["rounds"]) for run in runs),
            "tokens_per_second": row["tokens_per_second"],
        }
        return as_published, {
            "method": entry.name,
            "dataset": entry.column.dataset,
            "context_tokens": round(median(result["context_tokens"] for result in results)),
            **row,
        }

    entries = [
        TableEntry(line, column, names[line.name], scaled.options(line, column), list(units_of[column.name]))
        for column, line in product(table.columns, table.lines)
    ]
    units = {name: unit for column_units in units_of.values() for name, unit in column_units.items()}
    return TablePlan(units, entries, figures, bench.notes_on_short_prompts(lengths))
