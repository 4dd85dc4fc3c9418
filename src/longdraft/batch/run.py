"""A run: reads rows a little ahead, has them decoded, and writes their answers in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

from longdraft.batch.output import Output
from longdraft.batch.rows import Line
from longdraft.errors import CapabilityError
from longdraft.model.checkpoints import Progress

# Seconds to wait for an answer before looking whether the run was cancelled.
_PATIENCE = 0.2
# After this many unexpected errors in a row, the engine itself is taken to have failed.
_BROKEN = 8


@dataclass(frozen=True)
class Figures:
    """Counts of rows: how many, their new tokens, verifications, and the tokens that these emitted."""

    rows: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(sum(pair) for pair in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mean_accepted_length(self) -> float:
        """Emitted tokens / verifications, over all rows."""
        return self.accepted / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Answer:
    """A row of the output.

    Attributes:
        failed: the row holds an error. unexpected: which is not one of longdraft's own.
    """

    number: int
    row: dict[str, Any] = field(repr=False)
    failed: bool = False
    unexpected: bool = False
    figures: Figures = Figures(rows=1)


class Decoder(Protocol):
    """Decodes the rows: the engine of this process, or Ray's actors.

    Attributes:
        ahead: how many rows to submit before their answers are needed.
        decisive: what the texts depend on, as JSON values.
    """

    ahead: int

    @property
    def decisive(self) -> dict[str, Any]: ...

    def prepare(self, progress: Progress | None = None) -> None:
        """Called once, before the first row."""

    def drive(self, feed: Callable[[], None]) -> None:
        """Decodes while ``feed``, which calls ``submit`` and ``take``, runs."""

    def submit(self, line: Line) -> None: ...

    def take(self, timeout: float) -> Answer | None:
        """The next answer, of any row; None after ``timeout`` seconds."""


def run(
    source: Iterator[Line],
    output: Output,
    decoder: Decoder,
    progress: Callable[[Figures], None] = lambda figures: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Figures:
    """Answers the rows that the output lacks.

    Args:
        source: the rows, from the first that the output lacks. progress: called after each row.

    Raises:
        CapabilityError: row after row fails with an unexpected error.
        CheckpointError: the input cannot be read, or the output cannot be written.
    """
    figures, ready = Figures(), dict[int, Answer]()
    read, broken, ended = output.rows, 0, False
    while not cancelled():
        while not ended and read - output.rows < decoder.ahead:
            line = next(source, None)
            if line is None:
                ended = True
            else:
                decoder.submit(line)
                read += 1
        if read == output.rows:
            break
        answer = decoder.take(_PATIENCE)
        if answer is None:
            continue
        ready[answer.number] = answer
        while (written := ready.pop(output.rows, None)) is not None:
            output.write(written.row, written.failed)
            broken = broken + 1 if written.unexpected else 0
            if broken == _BROKEN:
                output.take_back(_BROKEN)
                raise CapabilityError(
                    f"{_BROKEN} rows after row {output.rows} failed, each with an error of the engine: {written.row} "
                    f"The {output.rows} rows before are written. Fix the cause, and run the same command to go on."
                )
            figures += written.figures
            progress(figures)
    return figures
