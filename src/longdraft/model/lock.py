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

    It is not lost when Ctrl-C or another exception comes while a thread waits for it, takes it or holds it. An
    exception of that kind is raised between two steps of Python code, never before a call of compiled code such as
    ``deque.remove`` has done its work: that is why nothing below is put into a function of its own.
    """

    def __init__(self) -> None:
        self._held = threading.RLock()
        # Threads that wait: the first of them for the lock itself, each other one until its own place is released.
        self._line: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        held, line = self._held, self._line
        if held._is_owned():  # type: ignore[attr-defined]
            try:
                held.acquire()
            except BaseException:  # this thread had it already and did not wait: what was raised came after
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
                    except (IndexError, RuntimeError):  # nobody waits, or the next one has been told before
                        pass
        except BaseException:
            if held._is_owned():  # type: ignore[attr-defined]
                held.release()
            raise

    @property
    def __exit__(self) -> Callable[..., Any]:
        # The compiled release itself: a signal cannot come between its beginning and its end.
        return self._held.__exit__

    def take_if_free(self) -> bool:
        """Takes the lock if that needs no waiting; :meth:`release` gives it back."""
        return self._held.acquire(blocking=False)

    def release(self) -> None:
        """Gives back what :meth:`take_if_free` took."""
        self._held.release()


_locks: WeakKeyDictionary[nn.Module, FairLock] = WeakKeyDictionary()
# Re-entrant, as the garbage collector may run anything while it is held. Whoever holds it waits for no other lock.
_registering = threading.RLock()


def lock_of(model: nn.Module) -> FairLock:
    """The one lock of a model: held for every forward, and for every step of a run."""
    with _registering:
        return _locks.setdefault(model, FairLock())
