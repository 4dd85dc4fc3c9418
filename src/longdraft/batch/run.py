"""A run: rows are read a little ahead, answered as the server answers requests, and written in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from longdraft.batch.output import OutputFile
from longdraft.batch.rows import Defaults, InputLine, Row
from longdraft.engine.session import Session
from longdraft.errors import CapabilityError, LongdraftError
from longdraft.model.checkpoints import Progress
from longdraft.serve.choice import SpecDecodingStats
from longdraft.serve.errors import ApiError
from longdraft.serve.service import Service
from longdraft.serve.settings import ServerSettings
from longdraft.speculator import Speculator

T = TypeVar("T")
# Rows to submit for each slot: while a long row holds back the file, the engine decodes those behind it.
_AHEAD = 8
# Seconds to wait for an answer before looking whether the run was cancelled.
_PATIENCE = 0.2
# After this many unexpected errors in a row, the engine itself is taken to have failed.
_BROKEN = 8


class RunCounts(NamedTuple):
    """Counts of rows, their new tokens, and of their drafts."""

    rows: int = 0
    new_tokens: int = 0
    spec_stats: SpecDecodingStats = SpecDecodingStats()  # is only added to


class RowResult(NamedTuple):
    """A row of the output.

    Attributes:
        failed: the row holds an error. unexpected: which is not one of longdraft's own.
    """

    row: dict[str, Any]
    failed: bool = False
    unexpected: bool = False
    new_tokens: int = 0
    spec_stats: SpecDecodingStats = SpecDecodingStats()


class _Rows(Service):
    """A service without a prompt cache: a row's text depends on no row before it, not even in its last bit."""

    room = 0

    def new_session(self, method: str) -> Session:
        return self.speculator(method).session(self.settings.slots, context=self.room)


class BatchEngine:
    """Answers rows in this process.

    Args:
        slots: rows decoded at a time. context: tokens of text to take memory for at once; 0: as rows need it.

    Attributes:
        ahead: how many rows to ask for before their answers are needed.
    """

    def __init__(self, spec: Speculator, defaults: Defaults, slots: int, context: int = 0) -> None:
        if spec.tokenizer is None:
            raise CapabilityError("Rows need a tokenizer: Speculator(..., tokenizer=tokenizer).")
        self.max_in_flight, self._spec, self._defaults = _AHEAD * slots, spec, defaults
        settings = ServerSettings(
            defaults.model, (spec.method.name,), slots, spec.runner().context_length, 16 * self.max_in_flight,
            timeout=float("inf"), sse_ping_interval=float("inf"), foresee=defaults.sampling.foresee,
        )  # fmt: skip
        self.service = _Rows(settings, lambda _: spec, spec.tokenizer)
        self.service.room = context

    @property
    def reproducibility_settings(self) -> dict[str, Any]:
        """The settings the texts depend on. An exact method is not part of it, nor are the slots."""
        spec = self._spec
        decisive = asdict(self._defaults) | {"target": spec.runner().fingerprint}
        if not spec.exact:
            options = {name: str(value) for name, value in spec.options.items()}
            decisive["method"] = {"name": spec.method.name, **options}
        return decisive

    def prepare(self, progress: Progress | None = None) -> None:
        """Measures what verifications cost here, if the planner needs it."""
        self._spec.planner(progress)

    async def answer(self, line: InputLine) -> RowResult:
        row = Row(line, self._defaults)
        try:
            asked = row.create_response(self.service)
        except (ApiError, LongdraftError) as error:
            return RowResult(row.error_row(error), failed=True)
        try:
            asked.submit()
            body = await asked.full_response()
        except Exception as error:
            return RowResult(row.error_row(error), True, not isinstance(error, LongdraftError))
        speculation = sum((choice.spec_stats for choice in asked.choices), SpecDecodingStats())
        return RowResult(row.result_row(body, asked), False, False, asked.num_new_tokens, speculation)

    def run_with(self, feed: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns what ``feed`` does, which asks for answers. Decodes in this thread: the main one is fastest."""

        def feed_and_close() -> T:
            try:
                return asyncio.run(feed())
            finally:
                self.service.worker.close(0)

        with ThreadPoolExecutor(1, "longdraft batch") as pool:
            fed = pool.submit(feed_and_close)
            self.service.worker.run()
        return fed.result()


async def run(
    input_lines: Iterator[InputLine],
    output: OutputFile,
    engine: BatchEngine,
    progress: Callable[[RunCounts], None] = lambda figures: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> RunCounts:
    """Answers the rows that the output lacks.

    Args:
        input_lines: the rows, from the first that the output lacks. progress: called after each row.

    Raises:
        CapabilityError: row after row fails with an unexpected error.
        CheckpointError: the input cannot be read, or the output cannot be written.
    """
    figures, going = RunCounts(), deque[asyncio.Task[RowResult]]()
    held: list[RowResult] = []  # unexpected errors, until a row behind them is none

    def write() -> None:
        nonlocal figures
        for each in held:
            output.write(each.row, each.failed)
            counted = figures.new_tokens + each.new_tokens, figures.spec_stats + each.spec_stats
            figures = RunCounts(figures.rows + 1, *counted)
            progress(figures)
        held.clear()

    while not cancelled():
        while len(going) < engine.max_in_flight and (line := next(input_lines, None)) is not None:
            going.append(asyncio.create_task(engine.answer(line)))
        if not going:
            write()
            break
        await asyncio.wait([going[0]], timeout=_PATIENCE)
        while going and going[0].done():
            held.append(going.popleft().result())
            if not held[-1].unexpected:
                write()
            elif len(held) == _BROKEN:
                raise CapabilityError(
                    f"{_BROKEN} rows after row {output.rows} failed, each with an error of the engine: {held[-1].row} "
                    f"The {output.rows} rows before are written. Fix the cause, and run the same command to go on."
                )
    return figures
