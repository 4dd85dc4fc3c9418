"""Decodes rows with the engine of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from longdraft.batch.rows import Defaults, Line, Row
from longdraft.batch.run import Answer, Figures
from longdraft.engine.stats import Result
from longdraft.errors import CapabilityError, LongdraftError
from longdraft.model.checkpoints import Progress
from longdraft.serve.errors import ApiError
from longdraft.serve.service import Service
from longdraft.serve.settings import Settings
from longdraft.serve.ticket import Update
from longdraft.serve.worker import Worker
from longdraft.speculator import Speculator

# Rows to submit for each slot: while a long row holds back the file, the engine decodes those behind it.
_AHEAD = 8


class Local:
    """Args:
    slots: rows decoded at a time. context: tokens of text to take memory for at once; 0: as rows need it.
    """

    def __init__(self, spec: Speculator, defaults: Defaults, slots: int, context: int = 0) -> None:
        if spec.tokenizer is None:
            raise CapabilityError("Rows need a tokenizer: Speculator(..., tokenizer=tokenizer).")
        self.ahead = _AHEAD * slots
        self._spec, self._defaults = spec, defaults
        room, foresee = spec.runner().context_length, defaults.sampling.foresee
        settings = Settings(defaults.model, (spec.method.name,), context=room, foresee=foresee)
        self._service = Service(settings, lambda _: spec, spec.tokenizer)
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        # Without a prompt cache, a row's text does not depend on the rows before it, not even in its last bit.
        self.worker = Worker(lambda _: spec.session(slots, context=context), slots, 16 * self.ahead)

    @property
    def decisive(self) -> dict[str, Any]:
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

    def submit(self, line: Line) -> None:
        self.answer(line, self._answers.put)

    def answer(self, line: Line, listener: Callable[[Answer], None]) -> None:
        """Submits a row; the listener gets its answer, from the engine thread."""
        row = Row(line, self._defaults)
        try:
            asked = row.ask(self._service)
        except (ApiError, LongdraftError) as error:
            listener(Answer(line.number, row.failed(error), failed=True))
            return
        going = set(range(len(asked.choices)))

        def receive(i: int, update: Update) -> None:
            try:
                for delta in asked.choices[i].take(update) if i in going else ():
                    asked.answers[i].chunks(delta)
            except Exception as error:
                going.clear()
                listener(Answer(line.number, row.failed(error), True, not isinstance(error, LongdraftError)))
            if isinstance(update, Result) and i in going:
                going.remove(i)
                if not going:
                    results = [choice.result for choice in asked.choices if choice.result is not None]
                    new, rounds = sum(r.new_tokens for r in results), sum(r.rounds for r in results)
                    figures = Figures(1, new, rounds, sum(r.new_tokens - 1 for r in results if r.rounds))
                    listener(Answer(line.number, row.answered(self._service, asked), figures=figures))

        for i, choice in enumerate(asked.choices):
            choice.ticket.method, choice.ticket.listener = "", partial(receive, i)
        self.worker.submit(*(choice.ticket for choice in asked.choices))

    def take(self, timeout: float) -> Answer | None:
        try:
            return self._answers.get(timeout=timeout)
        except queue.Empty:
            return None

    def drive(self, feed: Callable[[], None]) -> None:
        """Decodes in this thread (the main one is fastest) while ``feed`` runs in another. Raises its errors."""
        errors: list[BaseException] = []

        def feed_and_close() -> None:
            try:
                feed()
            except BaseException as error:
                errors.append(error)
            finally:
                self.worker.close(0)

        feeder = threading.Thread(target=feed_and_close, name="longdraft batch", daemon=True)
        feeder.start()
        self.worker.run()
        feeder.join()
        if errors:
            raise errors[0]
