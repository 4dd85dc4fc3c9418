"""The run: rows are read a little ahead, decoded as they come, and written in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from longdraft.batch.output import Output
from longdraft.batch.rows import Line
from longdraft.errors import CapabilityError
from longdraft.model.checkpoints import Progress

# Seconds that a run waits for an answer before it looks whether it was cancelled.
_PATIENCE = 0.2
# So many rows in a row that fail with an error which is none of ours: it is the engine that fails.
_BROKEN = 8


@dataclass(frozen=True)
class Answer:
    """A row of the output.

    Attributes:
        failed: it says why there is no text. unexpected: with an error that is none of ours.
        rounds: verifications. accepted: tokens that came of these.
    """

    number: int
    row: dict[str, Any] = field(repr=False)
    failed: bool = False
    unexpected: bool = False
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0


class Decoder(Protocol):
    """Whoever decodes: the engine of this process, or actors elsewhere.

    Attributes:
        ahead: rows that are worth having in hand.
        decisive: what the texts depend on, as JSON holds it.
    """

    ahead: int

    @property
    def decisive(self) -> dict[str, Any]: ...

    def prepare(self, progress: Progress | None = None) -> None:
        """What takes a while before the first row."""

    def drive(self, feed: Callable[[], None]) -> None:
        """Decodes while ``feed``, which submits and takes, has not ended."""

    def submit(self, line: Line) -> None:
        """Hands a row in."""

    def take(self, timeout: float) -> Answer | None:
        """The next answer, of whichever row; None where none has come in so many seconds."""


@dataclass
class Figures:
    """Of this run: rows written, tokens, and what the mean accepted length is counted from."""

    rows: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0

    def count(self, answer: Answer) -> None:
        self.rows += 1
        self.tokens += answer.tokens
        self.rounds += answer.rounds
        self.accepted += answer.accepted

    @property
    def mean_accepted_length(self) -> float:
        """New tokens / verification forwards, of all rows."""
        return self.accepted / self.rounds if self.rounds else 0.0


def run(
    source: Iterator[Line],
    output: Output,
    decoder: Decoder,
    told: Callable[[Figures], None] = lambda figures: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Figures:
    """Answers the rows that are not in the output yet.

    Args:
        source: begins with the row that the output lacks. told: called after each row.

    Raises:
        CapabilityError: row after row fails, with an error that is none of ours.
        CheckpointError: the input cannot be read, or the output not be written.
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
                    f"The {output.rows} rows before are written; when it is put right, the same command goes on."
                )
            figures.count(written)
            told(figures)
    return figures
