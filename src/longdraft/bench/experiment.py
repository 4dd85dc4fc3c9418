"""The loop of every measurement, and the file that keeps its records.

A measurement consists of steps. A step makes records, and each record has a key. Records that are in the file are not
made again, so an interrupted run continues; Ctrl-C keeps the records so far.

A new measurement needs a frozen dataclass for its records, steps that make them, and a
:class:`~longdraft.bench.tables.Report`; ``cli.measuring.Rendered.measure`` does the rest. Contenders whose times are
compared run in the order of :func:`interleave`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from longdraft.bench.records import RecordFile

R = TypeVar("R")  # a record
K = TypeVar("K")  # a record's key
Tick = Callable[[str], None]
"""Called before each run with a few words about the run; moves the progress bar."""


@dataclass(frozen=True)
class Step(Generic[K, R]):
    """A part of a measurement.

    Attributes:
        description: a few words for the progress bar.
        keys: keys of the records that the step makes.
        measure: (keys of missing records, tick) -> those records. Calls ``tick`` before each run.
        ticks: number of runs of a record.
    """

    description: str
    keys: Sequence[K]
    measure: Callable[[Collection[K], Tick], Iterable[R]]
    ticks: int = 1


class Experiment(Generic[K, R]):
    """Steps, and the records that they have made.

    Args:
        key: a record -> its key.
        file: keeps the records on disk, and may hold records of an interrupted run; None: memory only.
    """

    def __init__(self, steps: Sequence[Step[K, R]], key: Callable[[R], K], file: RecordFile[R] | None = None) -> None:
        self._steps, self._key, self.file = steps, key, file
        self.keys = [step_key for step in steps for step_key in step.keys]
        self._records: dict[K, R] = {key(record): record for record in ([] if file is None else file.records)}

    @property
    def records(self) -> list[R]:
        """The records so far, in the order of the steps."""
        return [self._records[key] for key in self.keys if key in self._records]

    @property
    def ticks(self) -> int:
        """Calls of ``tick`` that are left."""
        return sum(step.ticks for step in self._steps for key in step.keys if key not in self._records)

    def run(self, on_step: Callable[[str], Tick]) -> Iterator[R]:
        """Makes the missing records. Yields each record after it is in the file.

        Args:
            on_step: called before each step with its description; returns the step's ``tick``.
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
"""``unit``: the unit's name; ``measured``: its result as a JSON object."""


class Unit(NamedTuple):
    """A part of a measurement that makes one record. ``ticks``: number of runs, each announced to ``tick``."""

    ticks: int
    measure: Callable[[Tick], Mapping[str, Any]]


def unit_experiment(units: Units, path: Path | None, header: Mapping[str, Any]) -> Experiment[str, UnitRecord]:
    """An experiment with one step and one record for each unit.

    Args:
        units: the units by name.
        path: the file of records; None: memory only.
        header: see :class:`~longdraft.bench.records.RecordFile`, also for errors.
    """

    def measure(name: str, missing: Collection[str], tick: Tick) -> Iterator[UnitRecord]:
        yield {"unit": name, "measured": units[name].measure(tick)}

    steps = [Step(name, (name,), partial(measure, name), unit.ticks) for name, unit in units.items()]
    file = None if path is None else RecordFile[UnitRecord](path, header, dict)
    return Experiment(steps, lambda record: str(record["unit"]), file)


def interleave(names: Sequence[K], repeats: int) -> Iterator[tuple[int, K]]:
    """Yields (repeat, name): all names in turn, in reverse order every second time, so that a machine that slows down
    slows all contenders alike."""
    for i in range(repeats):
        yield from ((i, name) for name in (names if i % 2 == 0 else reversed(names)))
