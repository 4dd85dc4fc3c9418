"""The lock of a model: fair, re-entrant, and not lost whatever comes in between."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from longdraft.model.twin import lock_of
from tests.support.tiny import tiny_model


def begun(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_free(lock: AbstractContextManager[bool]) -> bool:
    """As another thread sees it."""
    taken = threading.Event()

    def work() -> None:
        with lock:
            taken.set()

    begun(work).join(0.5)
    return taken.is_set()


def test_a_model_has_one_lock_and_who_has_it_takes_it_again():
    model = tiny_model()
    lock = lock_of(model)
    assert lock is lock_of(model) and lock is not lock_of(tiny_model())
    with lock, lock:
        assert not is_free(lock)
    assert is_free(lock)


class Alarm(Exception):
    """Stands for Ctrl-C."""


@pytest.fixture
def alarms():
    """Calling it has :class:`Alarm` raised in this thread after so many seconds; 0: not any more."""

    def ring(*_: object) -> None:
        raise Alarm

    if not hasattr(signal, "setitimer"):
        pytest.skip("signals are POSIX")
    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_alarms_at_any_moment_do_not_lose_it(alarms):
    lock, stop, inside = lock_of(tiny_model()), threading.Event(), []

    def busy() -> None:
        while not stop.is_set():
            with lock:
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

    threads, rung = [begun(busy) for _ in range(2)], 0
    for turn in range(200):
        try:
            alarms(1e-6 * (20 + 7 * turn % 400))
            while True:
                with lock, lock:
                    pass
        except Alarm:
            rung += 1
    alarms(0)
    stop.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert rung == 200 and is_free(lock)
