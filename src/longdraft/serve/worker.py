"""The engine thread: requests come in from many threads, one decodes them, and each is told what came of its own.

A session a method, made when it is first asked for. What a request's processors raise makes a whole forward fail: the
requests that took part in it are decoded once more, one by one, each in a session of its own. What one was told already
it is told again (a seed fixes every text), and the one that fails again ends with its error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from longdraft.engine.request import Request
from longdraft.engine.session import Session
from longdraft.engine.stats import Result, Step
from longdraft.errors import LongdraftError

logger = logging.getLogger("longdraft")


class Full(LongdraftError):
    """As many requests wait as may; attributes: ``seconds`` until one is worth trying again."""

    def __init__(self, waiting: int, seconds: float) -> None:
        super().__init__(f"{waiting} requests are waiting already: try again in {seconds:.0f} s.")
        self.seconds = seconds


class Draining(LongdraftError):
    """The server takes no requests any more."""


@dataclass(frozen=True)
class Again:
    """A request begins again; what it was told is told again."""


# What a listener is told: steps; that it begins again; at last its result, or what it failed with.
Told = Step | Again | Result | Exception


@dataclass(eq=False)
class Ticket:
    """A request that was handed in.

    Attributes:
        request: makes it, anew each time that it begins: processors have a state.
        arrived, began, ended: ``time.monotonic()``; 0 where that is still to come.
    """

    request: Callable[[], Request]
    method: str
    tell: Callable[[Told], None]
    arrived: float = field(default_factory=time.monotonic)
    began: float = 0.0
    ended: float = 0.0
    cancelled: bool = False


class Worker:
    """Args:
    session: makes a session of a method.
    slots: requests that a session decodes at a time. queue: requests that wait at most.
    idle: called when there is nothing to decode, again as long as it returns True.
    """

    def __init__(
        self, session: Callable[[str], Session], slots: int, queue: int, idle: Callable[[], bool] = lambda: False
    ) -> None:
        self._make, self._slots, self._queue, self._idle = session, slots, queue, idle
        self._sessions: dict[str, Session] = {}
        self._running: dict[str, dict[int, Ticket]] = {}
        self._waiting: deque[Ticket] = deque()
        self._alone: deque[Ticket] = deque()  # those that took part in what failed
        self._change = threading.Condition()
        self._closing = self._stopping = False
        self._took: deque[float] = deque([1.0], maxlen=32)  # seconds of the last requests
        self._began, self._ended = threading.Event(), threading.Event()

    def run(self) -> None:
        """Decodes until :meth:`close`. Best on the main thread: torch reads prompts a fifth faster there."""
        self._began.set()
        try:
            self._run()
        finally:
            self._ended.set()

    def start(self) -> None:
        """The same in a thread of its own."""
        threading.Thread(target=self.run, name="longdraft engine", daemon=True).start()
        self._began.wait()

    # --- from any thread ---

    def submit(self, ticket: Ticket) -> None:
        """Hands a request in; its listener is told from the engine thread, and must not take long.

        Raises:
            Full: as many wait as may. Draining: :meth:`close` was called.
        """
        with self._change:
            if self._closing:
                raise Draining("The server is shutting down.")
            if len(self._waiting) >= self._queue:
                seconds = len(self._waiting) / self._slots * sum(self._took) / len(self._took)
                raise Full(len(self._waiting), max(1.0, seconds))
            self._waiting.append(ticket)
            self._change.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request within a round. One that has ended is left as it is."""
        with self._change:
            ticket.cancelled = True
            self._change.notify()

    def close(self, timeout: float | None = None) -> None:
        """Takes no more requests, and waits until those that run and wait have ended; after ``timeout`` s ends them."""
        with self._change:
            self._closing = True
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
        return self._closing

    @property
    def load(self) -> tuple[int, int]:
        """Requests that are decoded, and that wait."""
        return sum(map(len, list(self._running.values()))), len(self._waiting) + len(self._alone)

    # --- the engine thread ---

    def _run(self) -> None:
        while self._take():
            busy = False
            for method, session in list(self._sessions.items()):
                self._drop(session, self._running[method])
                if session.busy:
                    busy = True
                    self._step(method, session)
            if self._alone and not busy:
                self._retry(self._alone.popleft())
        while not self._stopping and self._use_idle():  # what was decoded last is worth keeping too
            pass
        for session in self._sessions.values():
            session.close()

    def _take(self) -> bool:
        """Lets waiting requests join; waits where there is nothing else to do. False: it is all over."""
        while True:
            with self._change:
                if self._stopping:
                    self._end_all()
                    return False
                joining = self._joining()
                idle = not joining and not self._alone and not any(self._running.values())
                if idle and self._closing and not self._waiting:
                    return False
            for ticket in joining:
                self._join(ticket)
            if not idle:
                return True
            if not self._use_idle():
                with self._change:
                    if not (self._waiting or self._closing or self._stopping):
                        self._change.wait()

    def _use_idle(self) -> bool:
        """Whether there may be more to do while nobody is decoded. What goes wrong with it is no request's trouble."""
        try:
            return self._idle()
        except Exception:
            logger.exception("what is done between requests failed")
            return False

    def _joining(self) -> list[Ticket]:
        """Takes from those that wait, in order, whom there is a slot for; drops those that were cancelled."""
        found: list[Ticket] = []
        free = {method: self._slots - len(running) for method, running in self._running.items()}
        for ticket in list(self._waiting):
            if not ticket.cancelled and free.setdefault(ticket.method, self._slots) < 1:
                continue
            self._waiting.remove(ticket)
            if ticket.cancelled:
                self._end(ticket, LongdraftError("cancelled"))
            else:
                free[ticket.method] -= 1
                found.append(ticket)
        return found

    def _join(self, ticket: Ticket) -> None:
        try:
            if ticket.method not in self._sessions:
                self._sessions[ticket.method] = self._make(ticket.method)
                self._running[ticket.method] = {}
            session = self._sessions[ticket.method]
            number = session.add(ticket.request())
        except Exception as error:
            self._end(ticket, error)
            return
        ticket.began = time.monotonic()
        self._running[ticket.method][number] = ticket

    def _drop(self, session: Session, running: dict[int, Ticket]) -> None:
        for number, ticket in running.items():
            if ticket.cancelled:
                session.abort(number)

    def _step(self, method: str, session: Session) -> None:
        running = self._running[method]
        try:
            steps = session.step()
        except Exception as error:
            logger.exception("a forward failed: its %d requests are decoded once more, one by one", len(running))
            self._failed(method, error)
            return
        for step in steps:
            ticket = running.get(step.sequence)
            if ticket is not None:
                self._tell(ticket, step)
                if step.finish_reason is not None and session.ended(step.sequence):
                    del running[step.sequence]
                    self._end(ticket, session.take(step.sequence))

    def _failed(self, method: str, error: Exception) -> None:
        """The session is over; its requests begin again, by themselves. A request that was alone has had its chance."""
        tickets = list(self._running.pop(method).values())
        self._sessions.pop(method)
        if len(tickets) == 1:
            self._end(tickets[0], error)
            return
        for ticket in tickets:
            self._tell(ticket, Again())
            self._alone.append(ticket)

    def _retry(self, ticket: Ticket) -> None:
        """A request alone: what it raises is its own fault."""
        try:
            session = self._make(ticket.method)
            try:
                number = session.add(ticket.request())
                while not session.ended(number):
                    self._drop(session, {number: ticket})
                    for step in session.step():
                        self._tell(ticket, step)
                    with self._change:
                        if self._stopping:
                            session.abort(number)
                self._end(ticket, session.take(number))
            finally:
                session.close()
        except Exception as error:
            self._end(ticket, error)

    def _end_all(self) -> None:
        for ticket in [
            *self._waiting,
            *self._alone,
            *(t for running in self._running.values() for t in running.values()),
        ]:
            self._end(ticket, Draining("The server has shut down before this request ended."))
        self._waiting.clear()
        self._alone.clear()
        self._running.clear()

    def _end(self, ticket: Ticket, told: Result | Exception) -> None:
        ticket.ended = time.monotonic()
        if ticket.began:
            self._took.append(ticket.ended - ticket.began)
        self._tell(ticket, told)

    def _tell(self, ticket: Ticket, told: Told) -> None:
        try:
            ticket.tell(told)
        except Exception:  # a listener's trouble is its own
            logger.exception("a listener failed")
            ticket.cancelled = True
