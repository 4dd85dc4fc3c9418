"""Tables of speed: every line is a contender of the bench, every column prompts of one length and batch."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from statistics import mean, median
from typing import Any

from longdraft.attention import dispatch
from longdraft.bench import report
from longdraft.bench.experiment import Tick
from longdraft.bench.json_lines import restored
from longdraft.bench.papers.table import Column, Line
from longdraft.bench.peers import PEERS
from longdraft.bench.prompts import Group, Prompt
from longdraft.bench.reproduce.scaled import Entry, Measuring, Record, Scaled, lacking, with_draft
from longdraft.bench.run import Bench, Measured
from longdraft.bench.settings import REFERENCE, Settings, contender
from longdraft.bench.tables import median_of, ratio
from longdraft.engine.sampler import Sampling
from longdraft.errors import CapabilityError
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner


@dataclass(frozen=True)
class Unit:
    """Runs that are measured together: a batch of prompts, by all contenders of an attention path."""

    path: str
    temperature: float
    group: Group

    @property
    def place(self) -> tuple[str, float, str, int | None, int]:
        first = self.group[0]
        return self.path, self.temperature, first.sample.dataset, first.context, len(self.group)

    def called(self, index: int) -> str:
        """Its name: the index-th of its data set, length and batch."""
        path, t, data, tokens, batch = self.place
        return f"{data}, {tokens or 'whole'} tokens, batch {batch}, T = {t:g}{path and ', ' + path}, {index + 1}"


class Speed(Measuring):
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
        self._scaled, self._loaded, self._drafts, self.differs = scaled, loaded, drafts, differs
        self._unpacked, self._progress = unpacked, progress
        self._reasons: dict[tuple[str, str], str | None] = {}
        table, fitting = scaled.table, self._fitting_cells()
        named = {line.name: contender(line.method, options) for line, _, options in fitting}
        self._baseline = named.get(table.baseline, table.baseline)
        self._options: dict[str, dict[str, dict[str, Any]]] = {}  # attention path -> contender -> options
        for line, _, options in fitting:
            given = with_draft(line.method, options, drafts)
            self._options.setdefault(line.attention, {})[contender(line.method, options)] = given
        for own in self._options.values():
            if self._baseline in PEERS:
                own.setdefault(self._baseline, {})
        self._units: dict[str, Unit] = {}
        for t, path in product(table.temperatures, self._options):
            for column in table.columns:
                texts, n = prompts[column.name], column.batch
                for i in range(len(texts) // n):
                    unit = Unit(path, t, tuple(texts[i * n : (i + 1) * n]))
                    self._units[unit.called(i)] = unit
        self.units = {name: self._ticks(unit) for name, unit in self._units.items()}
        self.entries = []
        for t, (line, column, options) in product(table.temperatures, fitting):
            # Columns that differ in options alone share their units.
            place = line.attention, t, column.data, prompts[column.name][0].context, column.batch
            units = [name for name, unit in self._units.items() if unit.place == place]
            self.entries.append(Entry(line, column, contender(line.method, options), options, units, t))
        self._bench: tuple[str, float, Bench] | None = None

    def _fitting_cells(self) -> list[tuple[Line, Column, dict[str, Any]]]:
        """Lines, columns and options; a line whose draft is missing is left out, with a note."""
        table, found = self._scaled.table, []
        refused: dict[tuple[str, str], list[str]] = {}  # (line, reason) -> columns
        for line, column in table.cells():
            options, reason = self._fitting(line, column)
            if reason is None:
                found.append((line, column, options))
            else:
                refused.setdefault((line.name, reason), []).append(column.name)
        self.notes = []
        for (name, reason), columns in refused.items():
            everywhere = len(columns) == sum(line.name == name for line, _ in table.cells())
            where = "" if everywhere else f" in {', '.join(columns)}"
            self.notes.append(f"{name} is left out{where}: {reason.rstrip('.')}.")
        if not found:
            raise CapabilityError(f"Nothing of {table.heading} can run: {' '.join(self.notes)}")
        return found

    def _fitting(self, line: Line, column: Column) -> tuple[dict[str, Any], str | None]:
        """The options of a line in a column, and why it cannot run; None if it can.

        At the small scale there are fewer chunks where the draft was trained for fewer, unless the column sweeps them.
        """
        options, runner = self._scaled.options(line, column), TargetRunner(self._loaded.model)
        while True:
            key = line.attention, contender(line.method, options)
            if key not in self._reasons:
                given = with_draft(line.method, options, self._drafts)
                self._reasons[key] = lacking(line.method, given, runner) or _path_missing(line.attention, runner)
            reason, fixed = self._reasons[key], not self._scaled.small or "chunks" in column.options
            if reason is None or fixed or options.get("chunks", 1) < 2:
                return options, reason
            options = {**options, "chunks": options["chunks"] // 2}

    def _ticks(self, unit: Unit) -> int:
        settings = self._settings(unit)
        cold = sum(settings.cold or n == REFERENCE or n in PEERS for n in settings.contenders)
        return cold + len(settings.contenders) * settings.repeats

    def measure(self, unit: str, tick: Tick) -> Record:
        own = self._units[unit]
        with _forced(own.path):
            if self._bench is None or self._bench[:2] != (own.path, own.temperature):
                self._bench = None
                gc.collect()
                bench = Bench(self._loaded, self._settings(own), (), self._progress, self._unpacked)
                bench.wake(own.group[0])
                self._bench = own.path, own.temperature, bench
            return asdict(self._bench[2].measure(own.group, tick))

    def _settings(self, unit: Unit) -> Settings:
        scaled, options = self._scaled, self._options[unit.path]
        return Settings(
            tuple(options),
            scaled.max_tokens,
            repeats=1 if scaled.small else 3,
            sampling=Sampling(unit.temperature, foresee=False),  # the papers' drafts know no random numbers
            ignore_eos=scaled.small,
            cold=scaled.table.prefill,
            own_options={name: own for name, own in options.items() if own},
            plan=scaled.plan,
            profile=scaled.table.profiled,
        )

    def figures(self, entry: Entry, own: Sequence[Record]) -> tuple[dict[str, float | None], dict[str, Any]]:
        table, name, measured = self._scaled.table, entry.name, [restored(Measured, each) for each in own]
        pairs = [(self._rate(m, name), self._rate(m, self._baseline)) for m in measured]
        accepted = median_of(run.mean_accepted_length for m in measured for run in m.rounds[name])
        found: dict[str, float | None] = {
            "accepted": table.counted(accepted),
            "tokens_per_second": median_of(rate for rate, _ in pairs),
            "speedup": median_of(ratio(*pair) for pair in pairs),
            **_parts([m.profiles[name]["seconds"] for m in measured if name in m.profiles]),
        }
        (row,) = report.rows([name], measured)
        return {key: found.get(key) for key in (*table.figures, "speedup")}, row

    def _rate(self, measured: Measured, name: str) -> float | None:
        """New tokens a second as the paper counts seconds, the median of the rounds."""
        # Seconds of the prompts' reading are the method's own, or those of plain decoding.
        read = (
            measured.cold.get(name, measured.cold[REFERENCE]).first_token_seconds if self._scaled.table.prefill else 0
        )
        rates = [
            (run.new_tokens - run.early) / seconds
            for run in measured.rounds.get(name, ())
            if any(run.rounds) and (seconds := run.decode_seconds + (read or 0.0))
        ]
        return median(rates) if rates else None


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


def _parts(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Parts of a round in milliseconds, means of the prompts."""
    if not seconds:
        return {}
    parts = {f"{part}_ms": 1000 * mean(each[part] for each in seconds) for part in seconds[0]}
    return {**parts, "verify_ms": parts["attention_ms"] + parts["forward_ms"]}
