"""A run: reads rows a little ahead, answers them as the server answers requests, and writes them in order."""

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
# Rows waiting or decoded for each slot: rows are written in order, and a long one must not leave other slots idle.
_ROWS_PER_SLOT = 8
_POLL_SECONDS = 0.2  # between checks whether the run was cancelled
_MAX_CONSECUTIVE_ERRORS = 8  # this many unexpected errors in a row end the run


class RunCounts(NamedTuple):
    """Counts of the rows answered in this run."""

    rows: int = 0
    new_tokens: int = 0
    spec_stats: SpecDecodingStats = SpecDecodingStats()  # a shared default: never changed


class RowResult(NamedTuple):
    """A row of the output, with its counts."""

    row: dict[str, Any]
    failed: bool = False  # the row has an error
    unexpected: bool = False  # the error is not a LongdraftError
    new_tokens: int = 0
    spec_stats: SpecDecodingStats = SpecDecodingStats()


class _BatchService(Service):
    """A service without a prompt cache, so that no bit of a row's KV depends on earlier rows."""

    context = 0  # tokens to allocate for each slot at the start; 0: slots grow with their rows

    def new_session(self, method: str) -> Session:
        return self.speculator(method).session(self.settings.slots, context=self.context)


class BatchEngine:
    """Answers rows in this process.

    Args:
        slots: number of rows decoded at a time.
        context: tokens to allocate for each slot at the start; 0: slots grow with their rows.

    Attributes:
        max_in_flight: limit of rows that are waiting or decoded.
    """

    def __init__(self, spec: Speculator, defaults: Defaults, slots: int, context: int = 0) -> None:
        if spec.tokenizer is None:
            raise CapabilityError("Rows need a tokenizer: Speculator(..., tokenizer=tokenizer).")
        self.max_in_flight, self._spec, self._defaults = _ROWS_PER_SLOT * slots, spec, defaults
        settings = ServerSettings(
            defaults.model, (spec.method.name,), slots, context=spec.runner().context_length,
            queue=16 * self.max_in_flight,  # a row may have n=16 choices
            timeout=float("inf"), sse_ping_interval=float("inf"), foresee=defaults.sampling.foresee,
        )  # fmt: skip
        self.service = _BatchService(settings, lambda _: spec, spec.tokenizer)
        self.service.context = context

    @property
    def reproducibility_settings(self) -> dict[str, Any]:
        """The settings that change the output. An exact method and the number of slots do not change it."""
        spec = self._spec
        settings = asdict(self._defaults) | {"target": spec.runner().fingerprint}
        if not spec.exact:
            options = {name: str(value) for name, value in spec.options.items()}
            settings["method"] = {"name": spec.method.name, **options}
        return settings

    def prepare(self, progress: Progress | None = None) -> None:
        """Measures the cost of verifications, if the planner needs it."""
        self._spec.planner(progress)

    async def answer(self, line: InputLine) -> RowResult:
        row = Row(line, self._defaults)
        try:
            pending = row.create_response(self.service)
        except (ApiError, LongdraftError) as error:
            return RowResult(row.error_row(error), failed=True)
        try:
            pending.submit()
            body = await pending.full_response()
        except Exception as error:
            return RowResult(row.error_row(error), failed=True, unexpected=not isinstance(error, LongdraftError))
        spec_stats = sum((choice.spec_stats for choice in pending.choices), SpecDecodingStats())
        return RowResult(row.result_row(body, pending), new_tokens=pending.num_new_tokens, spec_stats=spec_stats)

    def run_with(self, feed: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Decodes in this thread, while ``feed`` calls :meth:`answer` in another. Returns the result of ``feed``."""

        def feed_and_close() -> T:
            try:
                return asyncio.run(feed())
            finally:
                self.service.worker.close(0)

        with ThreadPoolExecutor(1, "longdraft batch") as pool:
            future = pool.submit(feed_and_close)
            self.service.worker.run()
        return future.result()


async def run(
    input_lines: Iterator[InputLine], output: OutputFile, engine: BatchEngine,
    progress: Callable[[RunCounts], None] = lambda counts: None, cancelled: Callable[[], bool] = lambda: False,
) -> RunCounts:  # fmt: skip
    """Answers rows and appends the results to the output, in order.

    Args:
        input_lines: the rows, from the first that the output lacks.
        progress: called after each row that was written.

    Raises:
        CapabilityError: consecutive rows fail with unexpected errors.
        CheckpointError: the input cannot be read, or the output cannot be written.
    """
    counts, tasks = RunCounts(), deque[asyncio.Task[RowResult]]()
    unwritten: list[RowResult] = []  # rows with unexpected errors, until a later row succeeds

    def write() -> None:
        nonlocal counts
        for result in unwritten:
            output.write(result.row, result.failed)
            spec_stats = counts.spec_stats + result.spec_stats
            counts = RunCounts(counts.rows + 1, counts.new_tokens + result.new_tokens, spec_stats)
            progress(counts)
        unwritten.clear()

    while not cancelled():
        while len(tasks) < engine.max_in_flight and (line := next(input_lines, None)) is not None:
            tasks.append(asyncio.create_task(engine.answer(line)))
        if not tasks:
            write()
            break
        await asyncio.wait([tasks[0]], timeout=_POLL_SECONDS)
        while tasks and tasks[0].done():
            unwritten.append(tasks.popleft().result())
            if not unwritten[-1].unexpected:
                write()
            elif len(unwritten) == _MAX_CONSECUTIVE_ERRORS:
                raise CapabilityError(
                    f"{_MAX_CONSECUTIVE_ERRORS} rows after row {output.rows} failed, each with an error of the engine: "
                    f"{unwritten[-1].row} Fix the cause, and run the same command to continue."
                )
    return counts
