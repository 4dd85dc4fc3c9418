"""The engine thread: requests come in from many threads, one thread decodes them, and each request's listener hears
what happens to it.

There is one session for each method, made on first use. A request's processors may raise, which makes a whole forward
fail. The requests in that forward then begin again, one by one, and emit the same tokens again (a seed fixes every
text). The request that fails again ends with its error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from longdraft.engine.request import Request
from longdraft.engine.session import Session
from longdraft.engine.stats import Result, Step
from longdraft.errors import LongdraftError, RequestError
from longdraft.serve.processors import ProcessorFactories

logger = logging.getLogger("longdraft")

# The result of a request that was cancelled while it waited.
_NOTHING = Result("", [], 0, "", True, "cancelled", 0.0, 0.0, 0)


@dataclass(frozen=True)
class Restarted:
    """The request begins again; its tokens so far will be repeated."""


# A listener hears steps and restarts, and at last the result or the error.
Update = Step | Restarted | Result | Exception


@dataclass(eq=False)
class RequestState:
    """A submitted request.

    Attributes:
        listener: called from the engine thread; must return quickly.
        makers: make its processors anew each time that it begins, because they have a state.
        arrived, began, ended: ``time.monotonic()``; 0 if it has not happened yet.
        alone: it was in a forward that failed, and is decoded with no other.
    """

    request: Request
    method: str
    listener: Callable[[Update], None] = lambda update: None
    processor_factories: ProcessorFactories = ()
    arrival_time: float = field(default_factory=time.monotonic)
    start_time: float = 0.0
    end_time: float = 0.0
    cancelled: bool = False
    isolated: bool = False

    def with_processors(self) -> Request:
        """The request with new processors."""
        return replace(
            self.request, processors=[*self.request.processors, *(make() for make in self.processor_factories)]
        )


class QueueFull(LongdraftError):
    """The queue has no room. ``retry_after``: when another attempt is worthwhile."""

    def __init__(self, num_waiting: int, retry_after: float) -> None:
        super().__init__(f"{num_waiting} requests are waiting already: try again in {retry_after:.0f} s.")
        self.retry_after = retry_after


class Draining(LongdraftError):
    """The server takes no more requests."""


class Worker:
    """The engine thread: decodes submitted requests, those of a method together.

    Args:
        session: makes a session for a method.
        slots: how many requests a session decodes at a time.
        queue: how many may wait.
        idle: called when there is nothing to decode, again as long as it returns True.
    """

    def __init__(
        self,
        new_session: Callable[[str], Session],
        slots: int,
        max_waiting: int,
        on_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._new_session, self._slots, self._queue, self._idle = new_session, slots, max_waiting, on_idle
        self._sessions: dict[str, Session] = {}
        self._running: dict[str, dict[int, RequestState]] = {}
        # Any thread changes these.
        self._change = threading.Condition()
        self._waiting: deque[RequestState] = deque()
        self._draining = self._stopping = False
        self._durations: deque[float] = deque([1.0], maxlen=32)  # seconds of the last requests
        self._began, self._ended = threading.Event(), threading.Event()

    def run(self) -> None:
        """Decodes until :meth:`close`. Best on the main thread: torch reads prompts a fifth faster there."""
        self._began.set()
        try:
            self._run()
        except Exception as error:
            with self._change:
                self._draining = True
            self._end_all(error)
            raise
        finally:
            self._ended.set()

    def start(self) -> None:
        """Runs in a thread of its own."""
        threading.Thread(target=self.run, name="longdraft engine", daemon=True).start()
        self._began.wait()

    # --- from any thread ---

    def submit(self, *states: RequestState) -> None:
        """Queues requests of one method, all or none.

        Raises:
            QueueFull: so many may not wait now. Draining: :meth:`close` was called. RequestError: so many never may.
        """
        most = self._queue + self._slots
        if len(states) > most:
            raise RequestError(f"{len(states)} answers in one request: at most {most} are decoded and wait here.")
        with self._change:
            if self._draining:
                raise Draining("The server is shutting down.")
            waiting = len(self._waiting)
            running = len(self._running.get(states[0].method, ()))
            if waiting + running + len(states) > most:
                seconds = (waiting + 1) / self._slots * sum(self._durations) / len(self._durations)
                raise QueueFull(waiting, max(1.0, seconds))
            self._waiting.extend(states)
            self._change.notify()

    def cancel(self, state: RequestState) -> None:
        """Ends a request within a round. Does nothing if it has ended."""
        state.cancelled = True

    def close(self, timeout: float | None = None) -> None:
        """Takes no more requests, and waits until all have ended; after ``timeout`` seconds ends them."""
        with self._change:
            self._draining = True
            self._change.notify()
        if not self._began.is_set():
            return
        self._ended.wait(timeout)
        with self._change:
            self._stopping = True
            self._change.notify()
        self._ended.wait()

    @property
    def alive(self) -> bool:
        return self._began.is_set() and not self._ended.is_set()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def load(self) -> tuple[int, int]:
        """Counts of requests that are decoded and that wait."""
        with self._change:
            waiting = len(self._waiting)
        return sum(map(len, list(self._running.values()))), waiting

    # --- the engine thread ---

    def _run(self) -> None:
        while self._admit():
            for method, session in list(self._sessions.items()):
                for number, ticket in self._running[method].items():
                    if ticket.cancelled:
                        session.abort(number)
                if session.busy:
                    self._step(method, session)
        while not self._stopping and self._use_idle():  # the texts decoded last are worth keeping too
            pass
        for session in self._sessions.values():
            session.close()

    def _admit(self) -> bool:
        """Starts waiting requests; blocks while there is nothing to do. Returns False when the worker should end."""
        while True:
            if self._stopping:
                self._end_all(Draining("The server has shut down before this request ended."))
                return False
            for ticket in self._joining():
                self._join(ticket)
            if any(self._running.values()):
                return True
            if not self._waiting:
                if self._draining:
                    return False
                if not self._use_idle():
                    with self._change:
                        self._change.wait_for(lambda: self._waiting or self._draining)

    def _use_idle(self) -> bool:
        """Calls ``on_idle``. Its errors are logged and concern no request."""
        try:
            return self._idle()
        except Exception:
            logger.exception("what is done between requests failed")
            return False

    def _joining(self) -> list[RequestState]:
        """Takes from the queue, in order, each request that has a free slot, and those that were cancelled."""
        running = [ticket for tickets in self._running.values() for ticket in tickets.values()]
        free = {method: self._slots - len(tickets) for method, tickets in self._running.items()}
        joining: list[RequestState] = []
        with self._change:
            for ticket in list(self._waiting):
                if not ticket.cancelled:
                    beside = [*running, *joining]
                    if beside and (ticket.isolated or any(each.isolated for each in beside)):
                        break  # nobody passes one that waits to be alone
                    if free.setdefault(ticket.method, self._slots) < 1:
                        continue
                    free[ticket.method] -= 1
                self._waiting.remove(ticket)
                joining.append(ticket)
        return joining

    def _join(self, ticket: RequestState) -> None:
        if ticket.cancelled:
            self._end(ticket, _NOTHING)
            return
        try:
            if ticket.method not in self._sessions:
                self._sessions[ticket.method] = self._new_session(ticket.method)
                self._running[ticket.method] = {}
            session = self._sessions[ticket.method]
            number = session.add(ticket.with_processors())
        except Exception as error:
            self._end(ticket, error)
            return
        ticket.start_time = time.monotonic()
        self._running[ticket.method][number] = ticket

    def _step(self, method: str, session: Session) -> None:
        running = self._running[method]
        try:
            steps = session.step()
        except Exception as error:
            logger.exception("a forward failed: its %d requests are decoded once more, one by one", len(running))
            self._abandon(method, error)
            return
        for step in steps:
            ticket = running.get(step.sequence)
            if ticket is not None:
                self._notify(ticket, step)
                if step.finish_reason is not None and session.ended(step.sequence):
                    del running[step.sequence]
                    self._end(ticket, session.take(step.sequence))

    def _abandon(self, method: str, error: Exception) -> None:
        """Drops a session that failed. Its requests begin again, each alone; one that was alone ends with the error."""
        tickets = list(self._running.pop(method).values())
        self._sessions.pop(method)
        if len(tickets) == 1:
            self._end(tickets[0], error)
            return
        for ticket in tickets:
            self._notify(ticket, Restarted())
            ticket.isolated = True
        with self._change:
            self._waiting.extendleft(reversed(tickets))

    def _end_all(self, outcome: Exception) -> None:
        running = [ticket for tickets in self._running.values() for ticket in tickets.values()]
        with self._change:
            running += self._waiting
            self._waiting.clear()
        for ticket in running:
            self._end(ticket, outcome)
        self._running.clear()

    def _end(self, ticket: RequestState, outcome: Result | Exception) -> None:
        ticket.end_time = time.monotonic()
        if ticket.start_time:
            self._durations.append(ticket.end_time - ticket.start_time)
        self._notify(ticket, outcome)

    def _notify(self, ticket: RequestState, update: Update) -> None:
        try:
            ticket.listener(update)
        except Exception:  # concerns this request only
            logger.exception("a listener failed")
            self.cancel(ticket)
