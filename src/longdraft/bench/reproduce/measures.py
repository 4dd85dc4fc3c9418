"""Plans the measurement of a paper's table, by its kind: ``plan_speed``, ``plan_needles`` or ``plan_quality``."""

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

import torch

from longdraft.attention import dispatch
from longdraft.bench import quality, report, tasks
from longdraft.bench.contenders import Run
from longdraft.bench.experiment import Tick, Unit
from longdraft.bench.needle import NeedleBench, TokenPrediction, accuracy, make_haystacks, perplexity
from longdraft.bench.papers.table import Column, Line
from longdraft.bench.peers import PEERS
from longdraft.bench.prompts import Prompt, PromptBatch
from longdraft.bench.quality import FULL, METHOD, QualityBench, QualitySettings, run_speed
from longdraft.bench.records import from_json
from longdraft.bench.reproduce.scaled import Figures, ScaledTable, TableEntry, TablePlan, UnitResult, add_draft, refusal
from longdraft.bench.reproduce.sources import MODULES, SampleSources
from longdraft.bench.run import BatchResult, Bench
from longdraft.bench.scores import rouge_l
from longdraft.bench.settings import REFERENCE, Settings, contender_name
from longdraft.bench.tables import median_of, ratio
from longdraft.engine.sampler import Sampling
from longdraft.errors import CapabilityError, ContextError, PromptError
from longdraft.metrics import average
from longdraft.model.load.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner
from longdraft.registry import KINDS

OWN_PATH = "own"
"""The attention path that this machine chooses, forced."""
AttentionPaths = tuple[str, str]
"""Forced attention paths, of verification and of prompts; see :class:`~longdraft.bench.papers.table.Line`."""
Prompts = Mapping[str, Sequence[Prompt]]
"""By the name of a column: the column's prompts."""
Drafts = Mapping[str, Sequence[Path]]
"""By the kind of draft: the user's folders and files."""


def plan_speed(
    scaled: ScaledTable, loaded: LoadedModel, prompts: Prompts, drafts: Drafts,
    load_dequantized: Callable[[], LoadedModel] | None = None, progress: Progress | None = None,
) -> TablePlan:  # fmt: skip
    """Plans a table of speed. A line is a contender of ``bench``; a column is a length of prompts and a batch size.

    Raises:
        CapabilityError: no line can run.
    """
    table = scaled.table
    available, notes = _available_cells(scaled, TargetRunner(loaded.model), drafts)
    contenders = {line.name: _contender(line, options) for line, _, options in available}
    baseline = contenders.get(table.baseline, table.baseline)
    # By attention paths and contender: the contender's options. Paths have a bench each, see ``_forced_attention``.
    options_by_paths: dict[AttentionPaths, dict[str, dict[str, Any]]] = {}
    for line, _, options in available:
        by_contender = options_by_paths.setdefault(line.attention_paths, {})
        by_contender[_contender(line, options)] = add_draft(line.method, options, drafts, line.draft_index)
    for by_contender in options_by_paths.values():
        if baseline in PEERS:
            by_contender.setdefault(baseline, {})
    benches: dict[tuple[AttentionPaths, float], Bench] = {}  # by paths and temperature; only the last bench is kept

    def measure(paths: AttentionPaths, settings: Settings, batch: PromptBatch, tick: Tick) -> UnitResult:
        key = paths, settings.sampling.temperature
        with _forced_attention(*paths):
            if key not in benches:
                benches.clear()
                gc.collect()
                benches[key] = Bench(loaded, settings, progress, load_dequantized)
                benches[key].warm_up(batch[0])
            return asdict(benches[key].measure(batch, tick))

    def batches(paths: AttentionPaths, temperature: float, column: Column) -> dict[str, PromptBatch]:
        """Returns a column's batches, each by a name for its unit. Columns that differ only in options share units."""
        group, size = prompts[column.name], column.batch
        name = f"{column.dataset}, {group[0].context or 'whole'} tokens, batch {size}, T = {temperature:g}"
        name += "".join(f", {path}" for path in paths if path)
        return {f"{name}, {i + 1}": tuple(group[i * size : (i + 1) * size]) for i in range(len(group) // size)}

    units: dict[str, Unit] = {}
    for temperature, (paths, by_contender) in product(table.temperatures, options_by_paths.items()):
        settings = _settings(scaled, by_contender, temperature)
        num_cold = sum(settings.cold or name == REFERENCE or name in PEERS for name in settings.contenders)
        num_runs = num_cold + len(settings.contenders) * settings.repeats
        for column in table.columns:
            for name, batch in batches(paths, temperature, column).items():
                units.setdefault(name, Unit(num_runs, partial(measure, paths, settings, batch)))

    def speed(results: Sequence[BatchResult], name: str) -> float | None:
        """Returns a contender's tokens/s as the paper counts and averages. Seconds are the median of a batch's runs."""
        pairs: list[tuple[float, float]] = []  # (tokens, seconds) of each batch
        for result in results:
            if runs := result.rounds.get(name):
                tokens, seconds = sum(n for n, _ in runs[0].token_counts), median(run.decode_seconds for run in runs)
                if table.includes_prefill:  # a method without a cold run uses the prefill of ar
                    prefill = result.cold.get(name, result.cold[REFERENCE]).first_token_seconds
                    tokens, seconds = runs[0].new_tokens, seconds + (prefill or 0.0)
                pairs.append((tokens, seconds))
        return average(pairs, table.rate_average)

    def figures(entry: TableEntry, unit_results: Sequence[UnitResult]) -> Figures:
        results: list[BatchResult] = [from_json(BatchResult, unit) for unit in unit_results]
        entry_speed, baseline_speed = speed(results, entry.name), speed(results, baseline)
        values = {
            **table.acceptance_stats(counts for result in results for counts in result.token_counts(entry.name)),
            "tokens_per_second": entry_speed,
            "speedup": ratio(entry_speed, baseline_speed),
            **mean_part_ms([result.profiles[entry.name] for result in results if entry.name in result.profiles]),
            "round_ms": _round_ms([run for result in results for run in result.rounds.get(entry.name, ())]),
            "prefill_s": _prefill_seconds([r.cold[entry.name] for r in results if entry.name in r.cold]),
        }
        (row,) = report.rows([entry.name], results)
        return {key: values.get(key) for key in (*table.figures, "speedup", "standard_error")}, row

    entries = []
    for temperature, (line, column, options) in product(table.temperatures, available):
        unit_names, name = list(batches(line.attention_paths, temperature, column)), _contender(line, options)
        entries.append(TableEntry(line, column, name, options, unit_names, temperature))
    return TablePlan(units, entries, figures, notes)


def _contender(line: Line, options: Mapping[str, Any]) -> str:
    """Returns the name of a line's contender. Two lines may differ in their drafts alone."""
    return contender_name(
        line.method, {**options, **({"draft": line.draft_index} if line.draft_index is not None else {})}
    )


def _settings(scaled: ScaledTable, by_contender: Mapping[str, Mapping[str, Any]], temperature: float) -> Settings:
    """Makes the bench's settings. ``by_contender``: the options of each contender."""
    offload = "host" if scaled.table.offload and torch.cuda.is_available() else None
    return Settings(
        tuple(by_contender), scaled.max_tokens, repeats=1 if scaled.is_small else 3,
        sampling=Sampling(temperature, foresee=False),  # in the papers drafts do not see the sampling noise
        ignore_eos=scaled.is_small, cold=scaled.table.includes_prefill, plan=scaled.plan,
        contender_options={name: options for name, options in by_contender.items() if options},
        profile=scaled.table.is_profiled, offload=offload,
    )  # fmt: skip


def _available_cells(
    scaled: ScaledTable, runner: TargetRunner, drafts: Drafts
) -> tuple[list[tuple[Line, Column, dict[str, Any]]], list[str]]:
    """Returns the cells (line, column, options) that can run, and notes on cells that cannot run and why.

    At the small scale the number of chunks is halved until the draft can use it. A column that varies the number of
    chunks keeps the number.
    """
    table = scaled.table
    # By attention paths and contender: why the contender cannot run; None if it can.
    reasons: dict[tuple[AttentionPaths, str], str | None] = {}
    available: list[tuple[Line, Column, dict[str, Any]]] = []
    refused: dict[tuple[str, str], list[str]] = {}  # by line and reason: the columns

    def reason_of(line: Line, options: Mapping[str, Any]) -> str | None:
        key = line.attention_paths, _contender(line, options)
        if key not in reasons:
            reasons[key] = refusal(line, options, drafts, runner)
            shape = runner.kv_shape
            for path in line.attention_paths:
                if path not in ("", OWN_PATH):
                    reason = dispatch.why_unavailable(path, runner.device, shape.dtype, shape.head_dim)
                    reasons[key] = reasons[key] or reason
        return reasons[key]

    for line, column in table.cells():
        options = scaled.options(line, column)
        may_halve = scaled.is_small and "chunks" not in column.options
        while (reason := reason_of(line, options)) and may_halve and options.get("chunks", 1) > 1:
            options = {**options, "chunks": options["chunks"] // 2}
        if reason is None:
            available.append((line, column, options))
        else:
            refused.setdefault((line.name, reason), []).append(column.name)
    notes = []
    for (name, reason), columns in refused.items():
        num_columns = sum(line.name == name for line, _ in table.cells())
        where = "" if len(columns) == num_columns else f" in {', '.join(columns)}"
        notes.append(f"{name} is left out{where}: {reason.rstrip('.')}.")
    if not available:
        raise CapabilityError(f"Nothing of {table.heading} can run: {' '.join(notes)}")
    return available, notes


@contextmanager
def _forced_attention(path: str, prefill_path: str) -> Iterator[None]:
    """Forces attention paths for runners that are made inside the context, without fused layers and CUDA graphs; two
    empty paths: nothing is forced. ``prefill_path``: for prompts; empty: ``path``."""
    if not path and not prefill_path:
        yield
        return
    paths = {dispatch.ENVIRONMENT_VARIABLE: path, dispatch.PREFILL_VARIABLE: prefill_path}
    forced = {name: dispatch.DEFAULT if value == OWN_PATH else value for name, value in paths.items()}
    forced[dispatch.FUSION_VARIABLE] = "off"
    previous = {name: os.environ.get(name) for name in forced}
    os.environ.update(forced)
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def mean_part_ms(profiles: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the mean milliseconds of each part of a round. ``profiles``: of each batch, from ``profile_job``."""
    if not profiles:
        return {}
    parts = profiles[0]["seconds"]
    part_ms = {f"{part}_ms": 1000 * mean(profile["seconds"][part] for profile in profiles) for part in parts}
    # Results of earlier versions have no number of forwards, and count updates as drafting.
    if num_forwards := mean(profile.get("draft_forwards", 0.0) for profile in profiles):
        part_ms["draft_forward_ms"] = part_ms["draft_ms"] / num_forwards
    part_ms["draft_ms"] += part_ms.get("update_ms", 0.0)
    return {**part_ms, "verify_ms": part_ms["attention_ms"] + part_ms["forward_ms"]}


def _round_ms(runs: Sequence[Run]) -> float | None:
    """Returns the mean milliseconds of a round in timed runs. A batch has as many rounds as its slowest sequence."""
    num_rounds = sum(max(run.rounds) for run in runs)
    return 1000 * sum(run.decode_seconds for run in runs) / num_rounds if num_rounds else None


def _prefill_seconds(runs: Sequence[Run]) -> float | None:
    """Returns the mean seconds from the start of cold runs to their first token."""
    seconds = [run.first_token_seconds for run in runs if run.first_token_seconds is not None]
    return mean(seconds) if seconds else None


def plan_needles(scaled: ScaledTable, loaded: LoadedModel, sources: SampleSources, drafts: Drafts) -> TablePlan:
    """Plans a table of needles: how well drafters predict a sentence of a long text. A line is a drafter's view.

    Raises:
        CapabilityError: a view's draft is missing.
        ContextError: the haystacks do not fit the model's context.
        PromptError: the paper's scale needs a text, and the user gave none.
    """
    (column,) = scaled.table.columns
    views = {line.name: (line.method, scaled.options(line, column)) for line in scaled.table.lines}
    bench = NeedleBench(loaded, views, {kind: KINDS[kind].load(paths[0]) for kind, paths in drafts.items()})
    length, context = scaled.prompt_tokens(column) or 0, bench.runner.context_length
    if length > context and not scaled.is_small:
        raise ContextError(f"Haystacks of {length:,} tokens exceed the context of {context:,}: take --scale small.")
    length = min(length, bench.max_haystack_tokens)
    if path := sources.files.get(column.dataset):
        file, origin = Path(path).expanduser(), ""
    elif sources.use_stand_ins:
        file, origin = tasks.module_source(MODULES[0]), " of Python's library"
    else:
        raise PromptError(
            f"Needles need a long text: give one, plain or JSONL, as --data {column.dataset}=FILE (a book of PG-19)."
        )

    def measure(haystack: Prompt, tick: Tick) -> UnitResult:
        return {"tokens": bench.measure(haystack, tick), "context_tokens": len(haystack.token_ids)}

    def figures(entry: TableEntry, results: Sequence[UnitResult]) -> Figures:
        predictions = [TokenPrediction(*fields) for result in results for fields in result["tokens"][entry.name]]
        values = {"accuracy": accuracy(predictions), "perplexity": perplexity(predictions)}
        return values, {
            "view": contender_name(entry.line.method, entry.options),
            "context_tokens": round(mean(result["context_tokens"] for result in results)),
            "haystacks": len(results), "tokens": len(predictions), **values,
        }  # fmt: skip

    haystacks = make_haystacks(file, length, loaded.tokenizer, scaled.num_prompts or 1, **scaled.template_kwargs)
    units = {
        f"haystack {i}, needle at {haystack.sample.needles[0][0]:g}": Unit(len(views), partial(measure, haystack))
        for i, haystack in enumerate(haystacks, 1)
    }
    entries = [TableEntry(line, column, line.name, views[line.name][1], list(units)) for line in scaled.table.lines]
    differences = {column.name: [f"haystacks of {length:,} tokens", f"the text is {file.name}{origin}"]}
    return TablePlan(units, entries, figures, differences=differences)


def plan_quality(scaled: ScaledTable, loaded: LoadedModel, prompts: Prompts, drafts: Drafts) -> TablePlan:
    """Plans a table of ``bench quality``, which compares the output of partial and of full verification.

    Raises:
        CapabilityError: the drafter's draft is missing, or rouge-score is not installed.
    """
    rouge_l()  # raises CapabilityError now, not after the first measurement
    table = scaled.table
    names: dict[str, str] = {}  # by line: the name of the contender
    variants: quality.Variants = {}
    common: dict[str, Any] = {}
    for line in table.lines:
        names[line.name] = FULL
        line_options = scaled.options(line, table.columns[0])
        if "drafter" in line_options:  # all lines have the same drafter
            common["drafter"] = line_options.pop("drafter")
        if line.method != FULL:
            variant = {**quality.VARIANT_DEFAULTS, **line_options}
            names[line.name] = contender_name(METHOD, variant)
            variants[names[line.name]] = variant
    options = add_draft(METHOD, common, drafts)
    settings = QualitySettings(
        variants, scaled.max_tokens, scaled.is_small and not table.answer_tokens, options=options,
        answer_tokens=table.answer_tokens,
    )  # fmt: skip
    bench = QualityBench(loaded, settings)
    context_lengths = [len(prompt.token_ids) + scaled.new_tokens for group in prompts.values() for prompt in group]
    column_units = {
        column.name: {
            f"{column.name}, prompt {i}": Unit(len(bench.names), partial(bench.measure, prompt))
            for i, prompt in enumerate(prompts[column.name], 1)
        }
        for column in table.columns
    }

    def figures(entry: TableEntry, results: Sequence[UnitResult]) -> Figures:
        runs = [result["runs"][entry.name] for result in results]
        row = quality.quality_figures(runs)  # with shares from 0 to 1, while the papers have per cent
        as_published = {
            "rouge_l": 100 * row["rouge_l_mean"],
            "score": None if row["score"] is None else 100 * row["score"],
            **table.acceptance_stats((run["tokens"] - 1, run["rounds"]) for run in runs),
            "tokens_per_second": row["tokens_per_second"],
            "speedup_vs_full": median_of(
                ratio(run_speed(result["runs"][entry.name]), run_speed(result["runs"][FULL])) for result in results
            ),
        }
        context_tokens = round(median(result["context_tokens"] for result in results))
        return as_published, {
            "method": entry.name, "dataset": entry.column.dataset, "context_tokens": context_tokens, **row,
        }  # fmt: skip

    entries = [
        TableEntry(line, column, names[line.name], scaled.options(line, column), list(column_units[column.name]))
        for column, line in product(table.columns, table.lines)
    ]
    units = {name: unit for by_name in column_units.values() for name, unit in by_name.items()}
    return TablePlan(units, entries, figures, bench.notes_on_short_prompts(context_lengths))
