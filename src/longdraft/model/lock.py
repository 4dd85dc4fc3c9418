"""The lock of a hosted model: one thread at a time, first come, first served."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


class FairLock:
    """A re-entrant lock for ``with``, which threads get in the order in which they asked for it.

    It is released even if Ctrl-C or another exception comes while a thread waits for it, takes it or holds it. Such an
    exception is raised between two steps of Python code, never inside a call of compiled code such as
    ``deque.remove``. That is why no step below is a function of its own.
    """

    def __init__(self) -> None:
        self._held = threading.RLock()
        # Waiting threads: the first waits for the lock itself, each other one until its place is released.
        self._line: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        """Number of threads that have asked for the lock and do not hold it yet."""
        return len(self._line)

    def __enter__(self) -> None:
        held, line = self._held, self._line
        if held._is_owned():  # type: ignore[attr-defined]
            try:
                held.acquire()
            except BaseException:  # this thread held the lock and did not wait, so the exception came afterwards
                held.release()
                raise
            return
        place = threading.Lock()
        place.acquire()
        try:
            try:
                line.append(place)
                while line[0] is not place:
                    place.acquire()
                held.acquire()
            finally:
                try:
                    line.remove(place)
                finally:
                    try:  # noqa: SIM105
                        line[0].release()
                    except (IndexError, RuntimeError):  # no thread waits, or the next one was released before
                        pass
        except BaseException:
            if held._is_owned():  # type: ignore[attr-defined]
                held.release()
            raise

    @property
    def __exit__(self) -> Callable[..., Any]:
        # The compiled release itself: a signal cannot interrupt it.
        return self._held.__exit__

    def take_if_free(self) -> bool:
        """Takes the lock if it is free; :meth:`release` gives it back. Returns True if taken."""
        return self._held.acquire(blocking=False)

    def release(self) -> None:
        """Gives back a lock from :meth:`take_if_free`."""
        self._held.release()


_locks: WeakKeyDictionary[nn.Module, FairLock] = WeakKeyDictionary()
# Re-entrant, as the garbage collector may run any code while it is held. No other lock is awaited inside.
_registering = threading.RLock()


def lock_of(model: nn.Module) -> FairLock:
    """The one lock of a model, held during every forward and every step of a run."""
    with _registering:
        return _locks.setdefault(model, FairLock())
