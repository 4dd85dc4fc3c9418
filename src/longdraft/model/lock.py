"""The lock of a hosted model: one thread at a time, in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


class FairLock:
    """A re-entrant lock for ``with``. A thread that has just had it gets it again behind those that wait.

    It is released even if Ctrl-C or another exception comes while a thread waits for it, takes it or holds it. Such an
    exception is raised between two steps of Python code, never inside a call of compiled code.
    """

    def __init__(self) -> None:
        self._held = threading.RLock()
        # Held by the thread that is next, for which the others wait.
        self._next = threading.Lock()

    def __enter__(self) -> None:
        held = self._held
        again = held._is_owned()  # type: ignore[attr-defined]
        try:
            if again:
                held.acquire()
            else:
                with self._next:
                    held.acquire()
        except BaseException:
            # A thread that holds it already did not wait, so the exception came when it had it once more.
            if held._is_owned():  # type: ignore[attr-defined]
                held.release()
            raise

    @property
    def __exit__(self) -> Callable[..., Any]:
        # The compiled release itself: a signal cannot interrupt it.
        return self._held.__exit__


_locks: WeakKeyDictionary[nn.Module, FairLock] = WeakKeyDictionary()
# Re-entrant, as the garbage collector may run any code while it is held. No other lock is awaited inside.
_registering = threading.RLock()


def lock_of(model: nn.Module) -> FairLock:
    """The one lock of a model, held during every forward and every step of a run."""
    with _registering:
        return _locks.setdefault(model, FairLock())
