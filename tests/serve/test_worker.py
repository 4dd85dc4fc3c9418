"""The engine thread: requests that come, are cancelled and end in any order get what they would get alone."""

from __future__ import annotations

import queue
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from longdraft import PromptCache, Request, Speculator
from longdraft.engine.stats import Result, Step
from longdraft.errors import LongdraftError, NumericalError
from longdraft.serve.worker import Draining, QueueFull, Restarted, Ticket, Worker
from tests.serve.conftest import MODEL, TOKENIZER

SPECS = {m: Speculator(m, MODEL, TOKENIZER, plan="fixed") for m in ("prompt-lookup", "ar")}
ALONE: dict[tuple, list[int]] = {}


def request(seed: int, length: int, sampled: bool) -> Request:
    prompt = [(seed + i * (1 + seed % 3)) % 61 for i in range(3 + seed % 40)]
    more = {"temperature": 0.9, "seed": seed} if sampled else {}
    return Request(prompt, max_new_tokens=length, eos_token_ids=[], **more)


def alone(key: tuple) -> list[int]:
    if key not in ALONE:
        ALONE[key] = SPECS["ar"].generate(request(*key), max_new_tokens=1)[0].token_ids
    return ALONE[key]


class Listener:
    def __init__(self, made, method="ar") -> None:
        self.told: queue.Queue = queue.Queue()
        self.ticket = Ticket(made, method, self.told.put)

    def end(self, seconds: float = 30.0):
        """Tokens, and the result or the error."""
        tokens: list[int] = []
        while True:
            told = self.told.get(timeout=seconds)
            if isinstance(told, Step):
                tokens += told.token_ids
            elif isinstance(told, Restarted):
                tokens = []
            else:
                return tokens, told


def worker(slots=2, size=64, make=None, **more) -> Worker:
    caches = {m: PromptCache() for m in SPECS}
    made = Worker(
        make or (lambda m: SPECS[m].session(slots, context=400, cache=caches[m], piece=16)), slots, size, **more
    )
    made.start()
    return made


@settings(max_examples=15)
@given(
    asked=st.lists(
        st.tuples(
            st.integers(0, 30), st.integers(1, 25), st.booleans(), st.sampled_from(sorted(SPECS)), st.integers(0, 9)
        ),
        min_size=1,
        max_size=9,
    )
)
def test_requests_that_come_and_go_get_what_they_would_get_alone(asked):
    made = worker()
    try:
        listeners = []
        for seed, length, sampled, method, leaves in asked:
            listener = Listener(lambda key=(seed, length, sampled): request(*key), method)
            made.submit(listener.ticket)
            listeners.append((listener, (seed, length, sampled)))
            if leaves == 0:
                made.cancel(listener.ticket)
        for listener, key in listeners:
            tokens, told = listener.end()
            if listener.ticket.cancelled:
                assert tokens == alone(key)[: len(tokens)]
            else:
                assert tokens == alone(key) == told.token_ids
        assert made.load == (0, 0)
    finally:
        made.close(5)


def test_memory_and_slots_do_not_grow_with_requests():
    made = worker()
    try:
        for round_ in range(30):
            listeners = [Listener(lambda i=i: request(i, 6, False)) for i in range(4)]
            for i, listener in enumerate(listeners):
                made.submit(listener.ticket)
                if (round_ + i) % 3 == 0:
                    made.cancel(listener.ticket)
            for listener in listeners:
                listener.end()
        (session,) = made._sessions.values()
        assert not session._entries and not session._engine.stats and sorted(session._engine._free) == [0, 1]
        assert session._engine.cache.store.slots == 2
    finally:
        made.close(5)


def test_a_forward_that_fails_ends_the_request_whose_fault_it_is_and_no_other():
    bad = request(1, 20, False)

    class Wrong:
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 8:
                raise NumericalError("nonsense")
            return scores

    made = worker(slots=3)
    try:
        good = [Listener(lambda key=key: request(*key)) for key in ((2, 25, False), (3, 25, True))]
        wrong = Listener(lambda: Request(bad.prompt, max_new_tokens=20, eos_token_ids=[], processors=[Wrong()]))
        for listener in (good[0], wrong, good[1]):
            made.submit(listener.ticket)
        assert isinstance(wrong.end()[1], NumericalError)
        assert [g.end()[0] for g in good] == [alone((2, 25, False)), alone((3, 25, True))]
        later = Listener(lambda: request(4, 5, False))
        made.submit(later.ticket)
        assert later.end()[0] == alone((4, 5, False))
    finally:
        made.close(5)


def test_the_queue_is_bounded_and_says_when_to_come_again():
    made = worker(slots=1, size=2)
    try:
        running = [Listener(lambda: request(1, 300, False)) for _ in range(8)]
        with pytest.raises(QueueFull) as full:
            for listener in running:
                made.submit(listener.ticket)
        assert full.value.seconds >= 1
    finally:
        made.close(0)


def test_closing_answers_what_there_is_and_takes_no_more():
    made = worker()
    listeners = [Listener(lambda i=i: request(i, 15, False)) for i in range(5)]
    for listener in listeners:
        made.submit(listener.ticket)
    closing = threading.Thread(target=made.close)
    closing.start()
    while not made.draining:
        pass
    with pytest.raises(Draining):
        made.submit(Listener(lambda: request(9, 2, False)).ticket)
    closing.join(30)
    assert [x.end()[0] for x in listeners] == [alone((i, 15, False)) for i in range(5)]
    assert not made.alive


def test_closing_in_a_hurry_tells_those_that_have_not_ended():
    made = worker(slots=1)
    listeners = [Listener(lambda: request(1, 350, False)) for _ in range(3)]
    for listener in listeners:
        made.submit(listener.ticket)
    made.close(0.05)
    assert all(isinstance(x.end()[1], (LongdraftError, Result)) for x in listeners)


def test_a_request_that_cannot_be_used_is_told_so():
    made = worker()
    try:
        listener = Listener(lambda: Request([1, 2], max_new_tokens=5000))
        made.submit(listener.ticket)
        assert isinstance(listener.end()[1], LongdraftError)
    finally:
        made.close(5)


def test_what_was_decoded_last_is_kept_before_it_ends():
    kept: list[int] = []

    def keep() -> bool:
        kept.append(len(kept))
        if len(kept) == 2:
            raise OSError("no space")
        return len(kept) % 5 > 0

    made = worker(idle=keep)
    listener = Listener(lambda: request(1, 40, False))
    made.submit(listener.ticket)
    before = len(kept)
    made.close()
    assert listener.end()[0] == alone((1, 40, False)) and len(kept) > before
