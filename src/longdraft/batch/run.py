"""Runs a batch: reads rows a little ahead, answers them as the server answers requests, writes answers in order."""

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
from longdraft.serve.choice import SpecDecodingStats
from longdraft.serve.errors import ApiError
from longdraft.serve.service import Service
from longdraft.serve.settings import ServerSettings
from longdraft.speculator import Speculator

T = TypeVar("T")
# Rows read ahead for each slot. Answers are written in order: while a long row decodes, the other slots need more rows.
_ROWS_PER_SLOT = 8
_POLL_SECONDS = 0.2  # between two checks whether the run was cancelled
_MAX_CONSECUTIVE_ERRORS = 8  # this many unexpected errors in a row end the run


class RunCounts(NamedTuple):
    """Totals over the rows that this run has written."""

    num_rows: int = 0
    num_new_tokens: int = 0
    spec_stats: SpecDecodingStats = SpecDecodingStats()  # counts of drafts; nothing changes this shared default


class RowResult(NamedTuple):
    """A row of the output, with the counts of its answer."""

    row: dict[str, Any]
    failed: bool = False  # the row holds an error instead of an answer
    unexpected: bool = False  # the error is not a LongdraftError
    num_new_tokens: int = 0
    spec_stats: SpecDecodingStats = SpecDecodingStats()


class _BatchService(Service):
    """A service without a prompt cache: the bits of a row's KV must not depend on earlier rows."""

    tokens_per_slot = 0  # see BatchEngine

    def new_session(self, method: str) -> Session:
        return self.speculator(method).session(self.settings.slots, context=self.tokens_per_slot)


class BatchEngine:
    """Answers rows in this process.

    Args:
        slots: number of rows decoded at a time.
        tokens_per_slot: KV entries to allocate for each slot at the start; 0: a slot grows with its row.

    Attributes:
        max_rows_in_flight: largest number of rows that wait or decode at a time.
    """

    def __init__(self, spec: Speculator, defaults: Defaults, slots: int, tokens_per_slot: int = 0) -> None:
        if spec.tokenizer is None:
            raise CapabilityError("Rows need a tokenizer: Speculator(..., tokenizer=tokenizer).")
        self.max_rows_in_flight, self._spec, self._defaults = _ROWS_PER_SLOT * slots, spec, defaults
        settings = ServerSettings(
            defaults.model, (spec.method.name,), slots, context=spec.runner().context_length,
            queue=16 * self.max_rows_in_flight,  # a row may have n=16 choices
            timeout=float("inf"), sse_ping_interval=float("inf"), foresee=defaults.sampling.foresee,
        )  # fmt: skip
        self.service = _BatchService(settings, lambda _: spec, spec.tokenizer)
        self.service.tokens_per_slot = tokens_per_slot

    @property
    def reproducibility_settings(self) -> dict[str, Any]:
        """The settings that change the answers. An exact drafting method and the number of slots change no answer."""
        spec = self._spec
        settings = asdict(self._defaults) | {"target": spec.runner().fingerprint}
        if not spec.exact:
            options = {name: str(value) for name, value in spec.options.items()}
            settings["method"] = {"name": spec.method.name, **options}
        return settings

    async def answer(self, line: InputLine) -> RowResult:
        """Answers a row of the input. A failure becomes a row of the output with the error."""
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
        return RowResult(row.result_row(body, pending), num_new_tokens=pending.num_new_tokens, spec_stats=spec_stats)

    def run_with(self, answer_rows: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Decodes in this thread; runs ``answer_rows``, which awaits :meth:`answer`, in another. Returns its result."""

        def answer_and_close() -> T:
            try:
                return asyncio.run(answer_rows())
            finally:
                self.service.worker.close(timeout=0)

        with ThreadPoolExecutor(1, "longdraft batch") as pool:
            future = pool.submit(answer_and_close)
            self.service.worker.run()
        return future.result()


async def run(
    input_lines: Iterator[InputLine], output: OutputFile, engine: BatchEngine,
    progress: Callable[[RunCounts], None] = lambda counts: None, cancelled: Callable[[], bool] = lambda: False,
) -> RunCounts:  # fmt: skip
    """Answers rows and appends the answers to the output, in order.

    Args:
        input_lines: the rows, from the first that the output lacks.
        progress: called with the run's counts after each row that was written.
        cancelled: True ends the run; rows in flight are not written.

    Raises:
        CapabilityError: consecutive rows fail with unexpected errors.
        CheckpointError: the input cannot be read, or the output cannot be written.
    """
    counts, tasks = RunCounts(), deque[asyncio.Task[RowResult]]()
    # Rows with unexpected errors are written once a later row succeeds. Otherwise the next run answers them again.
    unwritten_results: list[RowResult] = []

    def write_results() -> None:
        nonlocal counts
        for result in unwritten_results:
            output.write(result.row, result.failed)
            spec_stats = counts.spec_stats + result.spec_stats
            counts = RunCounts(counts.num_rows + 1, counts.num_new_tokens + result.num_new_tokens, spec_stats)
            progress(counts)
        unwritten_results.clear()

    while not cancelled():
        while len(tasks) < engine.max_rows_in_flight and (line := next(input_lines, None)) is not None:
            tasks.append(asyncio.create_task(engine.answer(line)))
        if not tasks:
            write_results()
            break
        await asyncio.wait([tasks[0]], timeout=_POLL_SECONDS)
        while tasks and tasks[0].done():
            unwritten_results.append(tasks.popleft().result())
            if not unwritten_results[-1].unexpected:
                write_results()
            elif len(unwritten_results) == _MAX_CONSECUTIVE_ERRORS:
                raise CapabilityError(
                    f"{_MAX_CONSECUTIVE_ERRORS} rows after row {output.num_rows} failed, each with an error of the "
                    f"engine: {unwritten_results[-1].row} Fix the cause, and run the same command to continue."
                )
    return counts
