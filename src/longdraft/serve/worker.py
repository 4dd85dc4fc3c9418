"""The engine thread: decodes requests from many threads, and reports to each request's listener.

Each decoding method has its own session, made on first use. If a logits processor raises, the forward of all running
requests fails. The requests are then restarted one at a time, and repeat their tokens, because each has a seed. A
request that fails while it is decoded alone ends with the error.
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

# The result of a request that was cancelled in the queue: no tokens, no time.
_CANCELLED = Result(
    text="", token_ids=[], prompt_tokens=0, method="", exact=True, finish_reason="cancelled", prefill_seconds=0.0,
    decode_seconds=0.0, rounds=0,
)  # fmt: skip


@dataclass(frozen=True)
class Restarted:
    """The request starts again, and will repeat its tokens."""


Update = Step | Restarted | Result | Exception
"""The argument of a listener: steps and restarts, and at the end the result or the error."""


@dataclass(eq=False)
class RequestState:
    """A request with its listener and times."""

    request: Request
    method: str
    listener: Callable[[Update], None] = lambda update: None  # called in the engine thread; must return quickly
    # make logits processors, which have state, each time the request is started or restarted
    processor_factories: ProcessorFactories = ()
    arrival_time: float = field(default_factory=time.monotonic)
    start_time: float = 0.0  # time.monotonic(); 0 before the start
    end_time: float = 0.0  # time.monotonic(); 0 before the end
    cancelled: bool = False
    isolated: bool = False  # the request was in a forward that failed, and must be decoded alone

    def with_processors(self) -> Request:
        """Returns the request with new processors."""
        new_processors = [factory() for factory in self.processor_factories]
        return replace(self.request, processors=[*self.request.processors, *new_processors])


class QueueFull(LongdraftError):
    """The queue is full. ``retry_after``: seconds after which a slot is probably free."""

    def __init__(self, num_waiting: int, retry_after: float) -> None:
        super().__init__(f"{num_waiting} requests are waiting already: try again in {retry_after:.0f} s.")
        self.retry_after = retry_after


class Draining(LongdraftError):
    """The server is shutting down and takes no more requests."""


class Worker:
    """The engine thread. Requests of one method are decoded together.

    Args:
        new_session: makes the session of a method.
        slots: number of requests that a session decodes at a time.
        max_waiting: number of requests that may wait.
        on_idle: called while there is nothing to decode, again and again as long as it returns True.
    """

    def __init__(
        self, new_session: Callable[[str], Session], slots: int, max_waiting: int,
        on_idle: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._new_session, self._slots, self._max_waiting, self._on_idle = new_session, slots, max_waiting, on_idle
        self._sessions: dict[str, Session] = {}
        self._running: dict[str, dict[int, RequestState]] = {}  # {method: {sequence id: its request}}
        self._condition = threading.Condition()  # guards the queue and the flags, which any thread may change
        self._waiting: deque[RequestState] = deque()
        self._draining = False  # True: no new requests are taken
        self._stopping = False  # True: running requests end with an error
        self._durations: deque[float] = deque([1.0], maxlen=32)  # seconds of the last requests; 1 s is a first guess
        self._started, self._ended = threading.Event(), threading.Event()

    def run(self) -> None:
        """Decodes until :meth:`close` is called. Prefer the main thread: prefill was measured a fifth faster there."""
        self._started.set()
        try:
            self._run()
        except Exception as error:
            with self._condition:
                self._draining = True
            self._end_all(error)
            raise
        finally:
            self._ended.set()

    def start(self) -> None:
        """Calls :meth:`run` in a new thread."""
        threading.Thread(target=self.run, name="longdraft engine", daemon=True).start()
        self._started.wait()

    # --- called from any thread ---

    def submit(self, *states: RequestState) -> None:
        """Queues requests of one method: all, or none if it raises.

        Raises:
            QueueFull: too many requests are waiting now.
            Draining: :meth:`close` was called.
            RequestError: the queue could never hold this many.
        """
        capacity = self._max_waiting + self._slots
        if len(states) > capacity:
            raise RequestError(f"{len(states)} answers are too many for one request: ask for {capacity} at most.")
        with self._condition:
            if self._draining:
                raise Draining("The server is shutting down.")
            num_waiting = len(self._waiting)
            num_running = len(self._running.get(states[0].method, ()))
            if num_waiting + num_running + len(states) > capacity:
                seconds = (num_waiting + 1) / self._slots * sum(self._durations) / len(self._durations)
                raise QueueFull(num_waiting, max(1.0, seconds))
            self._waiting.extend(states)
            self._condition.notify()

    def cancel(self, state: RequestState) -> None:
        """Ends a request within one round. Has no effect on a request that has ended."""
        state.cancelled = True

    def close(self, timeout: float | None = None) -> None:
        """Refuses new requests and waits for the end of the others, which fail after ``timeout`` seconds."""
        with self._condition:
            self._draining = True
            self._condition.notify()
        if not self._started.is_set():
            return
        self._ended.wait(timeout)
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._ended.wait()

    @property
    def alive(self) -> bool:
        return self._started.is_set() and not self._ended.is_set()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def load(self) -> tuple[int, int]:
        """(number of running requests, number of waiting requests)"""
        with self._condition:
            num_waiting = len(self._waiting)
        return sum(map(len, list(self._running.values()))), num_waiting

    # --- called in the engine thread ---

    def _run(self) -> None:
        while self._admit():
            for method, session in list(self._sessions.items()):
                for sequence_id, state in self._running[method].items():
                    if state.cancelled:
                        session.abort(sequence_id)
                if session.busy:
                    self._step(method, session)
        while not self._stopping and self._run_idle():  # lets on_idle finish, such as saving the last requests' KV
            pass
        for session in self._sessions.values():
            session.close()

    def _admit(self) -> bool:
        """Starts waiting requests. Blocks while there is nothing to do. Returns False if the thread should end."""
        while True:
            if self._stopping:
                self._end_all(Draining("The server has shut down before this request ended."))
                return False
            for state in self._take_startable():
                self._start(state)
            if any(self._running.values()):
                return True
            if not self._waiting:
                if self._draining:
                    return False
                if not self._run_idle():
                    with self._condition:
                        self._condition.wait_for(lambda: self._waiting or self._draining)

    def _run_idle(self) -> bool:
        """Calls ``on_idle``. Its errors are only logged, because no request caused them."""
        try:
            return self._on_idle()
        except Exception:
            logger.exception("the work between requests failed")
            return False

    def _take_startable(self) -> list[RequestState]:
        """Removes from the queue, in order, cancelled requests, and requests for which a slot is free."""
        all_running = [state for states in self._running.values() for state in states.values()]
        free_slots = {method: self._slots - len(states) for method, states in self._running.items()}
        startable: list[RequestState] = []
        with self._condition:
            for state in list(self._waiting):
                if not state.cancelled:
                    active = [*all_running, *startable]
                    if active and (state.isolated or any(other.isolated for other in active)):
                        break  # an isolated request is not overtaken
                    if free_slots.setdefault(state.method, self._slots) < 1:
                        continue
                    free_slots[state.method] -= 1
                self._waiting.remove(state)
                startable.append(state)
        return startable

    def _start(self, state: RequestState) -> None:
        """Adds a request to the session of its method; ends a cancelled request."""
        if state.cancelled:
            self._end(state, _CANCELLED)
            return
        try:
            if state.method not in self._sessions:
                self._sessions[state.method] = self._new_session(state.method)
                self._running[state.method] = {}
            session = self._sessions[state.method]
            sequence_id = session.add(state.with_processors())
        except Exception as error:
            self._end(state, error)
            return
        state.start_time = time.monotonic()
        self._running[state.method][sequence_id] = state

    def _step(self, method: str, session: Session) -> None:
        """Decodes one step of a session, and reports it to the listeners."""
        running = self._running[method]
        try:
            steps = session.step()
        except Exception as error:
            logger.exception("a forward failed: its %d requests are decoded once more, one by one", len(running))
            self._drop_session(method, error)
            return
        for step in steps:
            state = running.get(step.sequence)
            if state is not None:
                self._notify(state, step)
                # finish_reason: no later step in ``steps``. ended: none in a later call, so take() is allowed.
                if step.finish_reason is not None and session.ended(step.sequence):
                    del running[step.sequence]
                    self._end(state, session.take(step.sequence))

    def _drop_session(self, method: str, error: Exception) -> None:
        """Drops a session that failed. Restarts its requests, each isolated; a lone request ends with the error."""
        states = list(self._running.pop(method).values())
        self._sessions.pop(method)
        if len(states) == 1:
            self._end(states[0], error)
            return
        for state in states:
            self._notify(state, Restarted())
            state.isolated = True
        with self._condition:
            self._waiting.extendleft(reversed(states))

    def _end_all(self, outcome: Exception) -> None:
        states = [state for running in self._running.values() for state in running.values()]
        with self._condition:
            states += self._waiting
            self._waiting.clear()
        for state in states:
            self._end(state, outcome)
        self._running.clear()

    def _end(self, state: RequestState, outcome: Result | Exception) -> None:
        """Records the end of a request, and reports the result or the error."""
        state.end_time = time.monotonic()
        if state.start_time:
            self._durations.append(state.end_time - state.start_time)
        self._notify(state, outcome)

    def _notify(self, state: RequestState, update: Update) -> None:
        try:
            state.listener(update)
        except Exception:  # concerns this request only
            logger.exception("a listener failed")
            self.cancel(state)
