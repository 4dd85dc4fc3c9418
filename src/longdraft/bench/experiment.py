"""The loop that every measurement runs in, and the file that keeps what it has.

A measurement is made of steps, and a step makes records, each of which is known by a key. Steps whose records are in
the file already are left out, so a run that was stopped goes on where it was; Ctrl-C keeps what there is.

Another measure brings a frozen dataclass for its records, steps that make them, and a
:class:`~longdraft.bench.tables.Report` of what was found: ``cli.measuring.Rendered.measure`` does all else. Contenders
whose times are compared run in turn, in the order of :func:`interleave`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from longdraft.bench.records import RecordFile

R = TypeVar("R")
K = TypeVar("K")
Tick = Callable[[str], None]


@dataclass(frozen=True)
class Step(Generic[K, R]):
    """A part of a measurement.

    Attributes:
        description: it in a few words, for progress.
        keys: of the records that it makes.
        measure: yields the records whose keys are missing; calls ``tick`` before each run.
        ticks: calls of ``tick`` for each record.
    """

    description: str
    keys: Sequence[K]
    measure: Callable[[Collection[K], Tick], Iterable[R]]
    ticks: int = 1


class Experiment(Generic[K, R]):
    """Steps, and the records that they have made.

    Args:
        key: the key of a record.
        file: keeps records, and has those of earlier runs; None: none.
    """

    def __init__(
        self,
        steps: Sequence[Step[K, R]],
        key: Callable[[R], K],
        file: RecordFile[R] | None = None,
    ) -> None:
        self._steps, self._key, self.file = steps, key, file
        self.keys = [each for step in steps for each in step.keys]
        self._records: dict[K, R] = {key(record): record for record in ([] if file is None else file.records)}

    @property
    def records(self) -> list[R]:
        """The records that there are, in the order of the steps."""
        return [self._records[key] for key in self.keys if key in self._records]

    @property
    def ticks(self) -> int:
        """Calls of ``tick`` that are still to come."""
        return sum(step.ticks for step in self._steps for key in step.keys if key not in self._records)

    def run(self, ticking: Callable[[str], Tick]) -> Iterator[R]:
        """Makes the missing records, and yields each when it is kept.

        Args:
            ticking: called before each step with what it is; returns its ``tick``.
        """
        for step in self._steps:
            if missing := [key for key in step.keys if key not in self._records]:
                for record in step.measure(missing, ticking(step.description)):
                    if self.file is not None:
                        self.file.append(record)
                    self._records[self._key(record)] = record
                    yield record


UnitRecord = dict[str, Any]
"""``unit``: its name; ``measured``: a plain object for JSON, of a paper's table or of the quality of texts."""


class Unit(NamedTuple):
    """A part of a measurement that is kept at once. ``ticks``: how often ``measure`` calls its ``tick``."""

    ticks: int
    measure: Callable[[Tick], Mapping[str, Any]]


def unit_experiment(
    units: Mapping[str, Unit], path: Path | None, header: Mapping[str, Any]
) -> Experiment[str, UnitRecord]:
    """The measurement of units, by name, with what a file of records has already.

    Raises:
        ConfigError: the file holds a run with other settings. CheckpointError: it cannot be used.
    """

    def measured(unit: str, missing: Collection[str], tick: Tick) -> Iterator[UnitRecord]:
        yield {"unit": unit, "measured": units[unit].measure(tick)}

    steps = [Step(unit, (unit,), partial(measured, unit), ticks) for unit, (ticks, _) in units.items()]
    file = None if path is None else RecordFile[UnitRecord](path, header, dict)
    return Experiment(steps, lambda record: str(record["unit"]), file)


def interleave(names: Sequence[K], repeats: int) -> Iterator[tuple[int, K]]:
    """Rounds of contenders: all in turn, the order turned round from one round to the next, so that a machine that
    slows down slows all of them."""
    for i in range(repeats):
        yield from ((i, name) for name in (names if i % 2 == 0 else reversed(names)))
