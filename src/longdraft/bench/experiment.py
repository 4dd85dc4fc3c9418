"""Runs a measurement, and keeps its records in a file.

A measurement consists of steps. A step makes records, and each record has a key. Records that are in the file are not
made again, so an interrupted measurement continues; Ctrl-C keeps the records so far.

A new measurement needs a frozen dataclass for its records, steps that make the records, and a
:class:`~longdraft.bench.tables.Report`; ``cli.measure_options`` runs and prints it. Contenders whose times are compared
run in the order of :func:`interleave`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from longdraft.bench.records import RecordFile

R = TypeVar("R")  # a record
K = TypeVar("K")  # a record's key


class Tick(Protocol):
    """Moves the progress bar. A step calls it before each run, with a few words about the run. While the run reads its
    prompts, the step calls it again, with the number of prompt tokens that have been read."""

    def __call__(self, words: str, prefilled: int = 0, /) -> None: ...


def no_bar(words: str, prefilled: int = 0, /) -> None:
    """Is the tick of a measurement without a progress bar."""


@dataclass(frozen=True)
class Step(Generic[K, R]):
    """A part of a measurement that makes some records."""

    description: str  # a few words for the progress bar
    keys: Sequence[K]  # keys of the records that the step makes
    # makes the records of the keys in its first argument. Calls its second argument before each run
    measure: Callable[[Collection[K], Tick], Iterable[R]]
    runs_per_record: int = 1  # number of runs that make one record


class Experiment(Generic[K, R]):
    """Holds the steps of a measurement, and the records that the steps have made. ``file``: keeps the records on disk,
    and may hold records of an interrupted run; None: memory only."""

    def __init__(self, steps: Sequence[Step[K, R]], key: Callable[[R], K], file: RecordFile[R] | None = None) -> None:
        self._steps, self._key, self.file = steps, key, file
        self.keys = [step_key for step in steps for step_key in step.keys]
        self._records: dict[K, R] = {key(record): record for record in ([] if file is None else file.records)}

    @property
    def records(self) -> list[R]:
        """The records so far, in the order of the steps."""
        return [self._records[key] for key in self.keys if key in self._records]

    @property
    def num_runs_left(self) -> int:
        """Number of runs, and so of calls of ``tick``, that are left."""
        return sum(step.runs_per_record for step in self._steps for key in step.keys if key not in self._records)

    def run(self, on_step: Callable[[str], Tick]) -> Iterator[R]:
        """Makes the missing records. Yields a record when the file has it.

        Args:
            on_step: called before each step with the step's description; returns the ``tick`` of the step.
        """
        for step in self._steps:
            if missing := [key for key in step.keys if key not in self._records]:
                for record in step.measure(missing, on_step(step.description)):
                    if self.file is not None:
                        self.file.append(record)
                    self._records[self._key(record)] = record
                    yield record


Units = Mapping[str, "Unit"]
UnitRecord = dict[str, Any]
"""Keys: ``unit``, the name of a unit; ``measured``, the unit's result as a JSON object."""


class Unit(NamedTuple):
    """A step that makes one record. ``measure`` returns the record, and calls its argument before each run."""

    num_runs: int
    measure: Callable[[Tick], Mapping[str, Any]]


def unit_experiment(units: Units, path: Path | None, header: Mapping[str, Any]) -> Experiment[str, UnitRecord]:
    """Makes an experiment with one step and one record for each unit. ``path``: the file of records; None: no file."""

    def measure(name: str, missing: Collection[str], tick: Tick) -> Iterator[UnitRecord]:
        yield {"unit": name, "measured": units[name].measure(tick)}

    steps = [Step(name, (name,), partial(measure, name), unit.num_runs) for name, unit in units.items()]
    file = None if path is None else RecordFile[UnitRecord](path, header, dict)
    return Experiment(steps, lambda record: str(record["unit"]), file)


def interleave(items: Sequence[K], repeats: int) -> Iterator[tuple[int, K]]:
    """Yields (repeat, item) for all items in turn, every second time in reverse order. So a machine that slows down
    slows all items alike."""
    for repeat in range(repeats):
        yield from ((repeat, item) for item in (items if repeat % 2 == 0 else reversed(items)))
