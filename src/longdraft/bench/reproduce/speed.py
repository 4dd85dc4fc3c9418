"""Tables of speed: every line is a contender of the bench, every column prompts of one length and batch."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import mean, median
from typing import Any

from longdraft.attention import dispatch
from longdraft.bench import report, results
from longdraft.bench.contenders import Run
from longdraft.bench.papers.table import Column, Line
from longdraft.bench.peers import PEERS
from longdraft.bench.prompts import Group, Prompt
from longdraft.bench.reproduce.scaled import Cell, Scaled, Tick, differing, lacking, with_draft
from longdraft.bench.run import Bench, Measured
from longdraft.bench.settings import REFERENCE, Settings, contender
from longdraft.bench.tables import median_of, ratio
from longdraft.engine.sampler import Sampling
from longdraft.errors import CapabilityError
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner

Place = tuple[str, int | None, int]
"""Data set, length and batch of a column: columns that differ in options alone share their runs."""


class Speed:
    """A table that the bench fills.

    Args:
        prompts: of each column, by its name. differs: what differs in them.
        unpacked: as of :class:`~longdraft.bench.run.Bench`.
        drafts: drafts by kind, that the user gave.
    """

    def __init__(
        self,
        scaled: Scaled,
        loaded: LoadedModel,
        prompts: Mapping[str, Sequence[Prompt]],
        differs: Mapping[str, Sequence[str]],
        drafts: Mapping[str, Any],
        unpacked: Callable[[], LoadedModel] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._scaled, self._loaded, self._differs = scaled, loaded, differs
        self._unpacked, self._progress = unpacked, progress
        self.notes: list[str] = []
        self._names: dict[tuple[str, str], str] = {}  # (line, column) -> contender
        self._options: dict[str, dict[str, Any]] = {}
        self._given: dict[tuple[str, str], Mapping[str, Any]] = {}  # (line, column) -> options, without its draft
        self._reasons: dict[tuple[str, str], str | None] = {}
        self._parts: dict[str, list[str]] = {}  # attention path -> contenders
        self._choose(drafts)
        self._places: dict[str, Place] = {}
        groups: dict[Place, list[Group]] = {}
        for column in scaled.table.columns:
            own = prompts[column.name]
            self._places[column.name] = place = (column.data, own[0].context, column.batch)
            n = column.batch
            groups.setdefault(place, [tuple(own[i : i + n]) for i in range(0, len(own) - n + 1, n)])
        self._groups: dict[str, tuple[str, float, Group]] = {}
        for t in scaled.table.temperatures:
            for path in self._parts:
                for place, some in groups.items():
                    for i, group in enumerate(some):
                        self._groups[_unit(path, t, place, i)] = (path, t, group)
        self.units = list(self._groups)
        self._bench: tuple[str, float, Bench] | None = None

    def _choose(self, drafts: Mapping[str, Any]) -> None:
        """Settles the contenders; a line whose draft is missing is left out, with a note."""
        table, runner = self._scaled.table, TargetRunner(self._loaded.model)
        refused: dict[tuple[str, str], list[str]] = {}  # (line, reason) -> columns
        for line, column in table.cells():
            options, reason = self._fitting(line, column, drafts, runner)
            if reason is not None:
                refused.setdefault((line.name, reason), []).append(column.name)
                continue
            name = contender(line.method, options)
            self._names[line.name, column.name] = name
            self._options[name] = with_draft(line.method, options, drafts)
            self._given[line.name, column.name] = options
            part = self._parts.setdefault(line.attention, [])
            if name not in part:
                part.append(name)
        for (name, reason), columns in refused.items():
            everywhere = len(columns) == sum(line.name == name for line, _ in table.cells())
            where = "" if everywhere else f" in {', '.join(columns)}"
            self.notes.append(f"{name} is left out{where}: {reason.rstrip('.')}.")
        if not self._names:
            raise CapabilityError(f"Nothing of {table.heading} can run: {' '.join(self.notes)}")
        baseline = self._baseline
        for part in self._parts.values():
            if baseline in PEERS and baseline not in part:
                part.append(baseline)

    def _fitting(
        self, line: Line, column: Column, drafts: Mapping[str, Any], runner: TargetRunner
    ) -> tuple[dict[str, Any], str | None]:
        """The options of a line in a column, and why it cannot run; None if it can.

        At the small scale there are fewer chunks where the draft was trained for fewer, unless the column sweeps them.
        """
        options = self._scaled.options(line, column)
        while True:
            key = line.attention, contender(line.method, options)
            if key not in self._reasons:
                given = with_draft(line.method, options, drafts)
                self._reasons[key] = lacking(line.method, given, runner) or _path_missing(line.attention, runner)
            reason, fixed = self._reasons[key], not self._scaled.small or "chunks" in column.options
            if reason is None or fixed or options.get("chunks", 1) < 2:
                return options, reason
            options = {**options, "chunks": options["chunks"] // 2}

    @property
    def _baseline(self) -> str:
        """The contender that speed-ups are over: a line's, or a method."""
        name = self._scaled.table.baseline
        return next((own for (line, _), own in self._names.items() if line == name), name)

    def ticks(self, unit: str) -> int:
        path, _, _ = self._groups[unit]
        names = {REFERENCE, *self._parts[path]}
        cold = sum(self._settings(path, 0.0).cold or n == REFERENCE or n in PEERS for n in names)
        return cold + len(names) * self._settings(path, 0.0).repeats

    def measure(self, unit: str, tick: Tick) -> dict[str, Any]:
        path, t, group = self._groups[unit]
        with _forced(path):
            if self._bench is None or self._bench[:2] != (path, t):
                self._bench = None
                gc.collect()
                bench = Bench(self._loaded, self._settings(path, t), (), self._progress, self._unpacked)
                bench.wake(group[0])
                self._bench = path, t, bench
            return results.line(self._bench[2].measure(group, tick))

    def _settings(self, path: str, temperature: float) -> Settings:
        names, scaled = self._parts[path], self._scaled
        return Settings(
            tuple(names),
            scaled.max_tokens,
            repeats=1 if scaled.small else 3,
            sampling=Sampling(temperature=temperature, foresee=False),  # the papers' drafts know no random numbers
            ignore_eos=scaled.small,
            cold=scaled.table.prefill,
            own_options={name: self._options[name] for name in names if name in self._options},
            plan=scaled.plan,
            profile=scaled.table.profiled,
        )

    def cells(self, done: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
        measured = {unit: results.measurement(found) for unit, found in done.items()}
        found = []
        for t in self._scaled.table.temperatures:
            for line, column in self._scaled.table.cells():
                name = self._names.get((line.name, column.name))
                place = self._places[column.name]
                own = [
                    measured[unit]
                    for unit, (path, temperature, _) in self._groups.items()
                    if unit in measured and (path, temperature) == (line.attention, t) and _at(measured[unit], place)
                ]
                if name is not None and own:
                    found.append(self._cell(line, column, t, name, own))
        return found

    def _cell(self, line: Line, column: Column, t: float, name: str, own: Sequence[Measured]) -> Cell:
        table = self._scaled.table
        seconds = _with_prefill if table.prefill else _decoding
        pairs = [(_rate(m, name, seconds), _rate(m, self._baseline, seconds)) for m in own]
        accepted = median_of(run.mean_accepted_length for m in own for run in m.rounds[name])
        figures: dict[str, float | None] = {
            "accepted": table.counted(accepted),
            "tokens_per_second": median_of(rate for rate, _ in pairs),
            "speedup": median_of(ratio(*pair) for pair in pairs),
            **_profiled(m.profiles[name] for m in own if name in m.profiles),
        }
        shown = {key: figures.get(key) for key in (*table.figures, "speedup")}
        (row,) = report.rows([name], own)
        differs = differing(line, self._given[line.name, column.name], self._differs[column.name])
        return Cell(line, column, t, shown, row, differs)


def _unit(path: str, t: float, place: Place, index: int) -> str:
    data, tokens, batch = place
    return f"{data}, {tokens or 'whole'} tokens, batch {batch}, T = {t:g}{path and ', ' + path}, {index + 1}"


def _at(measured: Measured, place: Place) -> bool:
    return (measured.dataset, measured.context, measured.batch) == place


def _path_missing(path: str, runner: TargetRunner) -> str | None:
    """Why an attention path cannot be forced here; None if it can."""
    shape = runner.kv_shape
    return dispatch.unavailable(path, runner.device, shape.dtype, shape.head_dim) if path else None


@contextmanager
def _forced(path: str) -> Iterator[None]:
    """Forces an attention path on models that are hosted meanwhile; empty: none."""
    before = os.environ.get(dispatch.ENVIRONMENT)
    if path:
        os.environ[dispatch.ENVIRONMENT] = path
    try:
        yield
    finally:
        os.environ.pop(dispatch.ENVIRONMENT, None)
        if before is not None:
            os.environ[dispatch.ENVIRONMENT] = before


def _decoding(measured: Measured, name: str, run: Run) -> float:
    return run.decode_seconds


def _with_prefill(measured: Measured, name: str, run: Run) -> float:
    return run.decode_seconds + _prefill(measured, name)


def _prefill(measured: Measured, name: str) -> float:
    """Seconds of the prompts' reading: the method's own, or that of plain decoding."""
    return measured.cold.get(name, measured.cold[REFERENCE]).first_token_seconds or 0.0


def _rate(measured: Measured, name: str, seconds: Callable[[Measured, str, Run], float]) -> float | None:
    """New tokens a second, the median of the rounds."""
    runs = measured.rounds.get(name, ())
    rates = [
        (run.new_tokens - run.early) / taken
        for run in runs
        if any(run.rounds) and (taken := seconds(measured, name, run))
    ]
    return median(rates) if rates else None


def _profiled(profiles: Iterator[Mapping[str, Any]]) -> dict[str, float]:
    """Parts of a round in milliseconds, means of the prompts."""
    seconds = [profile["seconds"] for profile in profiles]
    if not seconds:
        return {}
    parts = {f"{part}_ms": 1000 * mean(each[part] for each in seconds) for part in seconds[0]}
    return {**parts, "verify_ms": parts["attention_ms"] + parts["forward_ms"]}
