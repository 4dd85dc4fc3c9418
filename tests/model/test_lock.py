"""The lock of a model: fair, re-entrant, and not lost whatever comes in between."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from longdraft.model.lock import FairLock


def begun(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_free(lock: FairLock) -> bool:
    """As another thread sees it."""
    order: list[str] = []
    joining(lock, order, "another").join(0.5)
    return bool(order)


def joining(lock: FairLock, order: list[str], name: str) -> threading.Thread:
    """A thread that takes the lock and puts its name into the list."""

    def work() -> None:
        with lock:
            order.append(name)

    return begun(work)


def test_who_has_just_had_it_stands_behind_those_who_wait_and_who_has_it_takes_it_again():
    lock, order, threads = FairLock(), [], []
    with lock:
        for name in "abcd":
            threads.append(joining(lock, order, name))
            time.sleep(0.02)
        with lock, lock:
            order.append("inside")
        assert not order[1:]
    for _ in range(5):
        with lock:
            order.append("again")
    for thread in threads:
        thread.join()
    assert order[:2] == ["inside", "a"] and sorted(order[2:]) == [*["again"] * 5, *"bcd"] and order[-1] == "again"
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


def test_one_who_gives_up_waiting_keeps_nobody_from_it(alarms):
    lock, taken, go, order = FairLock(), threading.Event(), threading.Event(), []

    def hold() -> None:
        with lock:
            taken.set()
            go.wait()

    threads = [begun(hold)]
    taken.wait()
    for behind in (False, True):  # next, and behind the next one
        alarms(0.05)
        with pytest.raises(Alarm), lock:
            pytest.fail("it is held")
        threads += [] if behind else [joining(lock, order, "after")]
        time.sleep(0.02)
    go.set()
    for thread in threads:
        thread.join()
    assert order == ["after"] and is_free(lock)


def test_alarms_at_any_moment_do_not_lose_it(alarms):
    lock, stop, inside = FairLock(), threading.Event(), []

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
