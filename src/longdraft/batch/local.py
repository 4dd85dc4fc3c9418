"""Rows through the engine of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from longdraft.batch.rows import Defaults, Line, Row
from longdraft.batch.run import Answer
from longdraft.engine.stats import Result
from longdraft.errors import CapabilityError, LongdraftError
from longdraft.model.checkpoints import Progress
from longdraft.serve.worker import Ticket, Told, Worker
from longdraft.speculator import Speculator

# Rows in hand for each slot: one that takes long holds the rows behind it back from the file, not from the engine.
_AHEAD = 8


class Local:
    """Args:
    slots: rows decoded at a time. context: tokens of the longest text that memory is taken for at once.
    """

    def __init__(self, spec: Speculator, defaults: Defaults, slots: int, context: int = 0) -> None:
        if spec.tokenizer is None:
            raise CapabilityError("Rows need a tokenizer: Speculator(..., tokenizer=tokenizer).")
        self.ahead = _AHEAD * slots
        self._spec = spec
        self._tokenizer, self._defaults = spec.tokenizer, defaults
        self._told: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        # Without a cache that is kept, a row's text does not depend on the rows before it, not even in its last bit.
        self.worker = Worker(lambda _: spec.session(slots, context=context), slots, self.ahead)

    @property
    def decisive(self) -> dict[str, Any]:
        """What the texts depend on. An exact method may be another one in the run that goes on, as may the slots."""
        spec, own = self._spec, asdict(self._defaults)
        found = own | {"target": spec.runner().fingerprint}
        if not spec.exact:
            found["method"] = {"name": spec.method.name, **{name: str(value) for name, value in spec.options.items()}}
        return found

    def prepare(self, progress: Progress | None = None) -> None:
        """Measures what verifications cost here, where trees are planned by it."""
        self._spec.planner(progress)

    def submit(self, line: Line) -> None:
        self.ask(line, self._told.put)

    def ask(self, line: Line, tell: Callable[[Answer], None]) -> None:
        """Hands a row in; its answer is told from the engine thread."""
        row = Row(line, self._defaults)
        if row.fault is not None:
            tell(Answer(line.number, row.failed(row.fault), failed=True))
            return

        def hear(told: Told) -> None:
            if isinstance(told, Result):
                new = told.new_tokens
                counts = new, told.rounds, new - 1 if told.rounds else 0
                tell(Answer(line.number, row.answered(told), False, False, *counts))
            elif isinstance(told, Exception):
                tell(Answer(line.number, row.failed(told), True, not isinstance(told, LongdraftError)))

        self.worker.submit(Ticket(lambda: row.request(self._tokenizer), "", hear))

    def take(self, timeout: float) -> Answer | None:
        try:
            return self._told.get(timeout=timeout)
        except queue.Empty:
            return None

    def drive(self, feed: Callable[[], None]) -> None:
        """Decodes in this thread, the main one where it can be, while another feeds, until that has ended.

        Raises:
            Exception: what the other one raises.
        """
        raised: list[BaseException] = []

        def feeding() -> None:
            try:
                feed()
            except BaseException as error:
                raised.append(error)
            finally:
                self.worker.close(0)

        feeder = threading.Thread(target=feeding, name="longdraft batch", daemon=True)
        feeder.start()
        self.worker.run()
        feeder.join()
        if raised:
            raise raised[0]
