"""Processes that share a model, as threads: what the first one is asked, all of them decode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

pytest.importorskip("fastapi")

from longdraft import Request, Speculator
from longdraft.engine.stats import Result
from longdraft.errors import LongdraftError, NumericalError
from longdraft.serve.processors import Processed
from longdraft.serve.telling import PeerLost, Telling
from longdraft.serve.ticket import Change, Ticket
from longdraft.serve.worker import Worker
from tests.serve.conftest import TOKENIZER
from tests.serve.over_http import wait_until
from tests.serve.test_worker import Submitted, alone, request
from tests.tiny import tiny_model


class Between:
    """Connects two threads, which call the same methods. calls: the first one's, by name."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(2), [("", None), ("", None)]
        self.calls: list[str] = []

    def all(self, rank: int, name: str, given: Any, timeout: float = 20.0) -> list[Any]:
        if rank == 0:
            self.calls.append(name)
        try:
            self.given[rank] = (name, given)
            self.barrier.wait(timeout)
            names, found = zip(*self.given, strict=True)
            self.barrier.wait(timeout)
        except threading.BrokenBarrierError as error:
            raise PeerLost("another has ended.") from error
        assert len(set(names)) == 1, "each waits for something else"
        return list(found)


@dataclass
class Wire:
    """One thread's end, in the place of :class:`longdraft.serve.telling.Wire`."""

    between: Between
    rank: int

    def most(self, number: int) -> int:
        return max(self.between.all(self.rank, "most", number))

    def first(self, message: bytes, size: int) -> bytes:
        told = self.between.all(self.rank, "first", message)[0]
        assert len(told) == size
        return told

    def meet(self) -> None:
        self.between.all(self.rank, "meet", None, 1.0)


@dataclass
class Share:
    """In the place of :class:`longdraft.model.sharded.Share`."""

    rank: int
    said: int = 0
    heard: int | None = None


class Process(Worker):
    """One process's worker. ended: what came of each request, by its ticket's number."""

    def __init__(self, model: Between, hosts: Between, rank: int) -> None:
        self.share, self.model, self.hosts = Share(rank), model, hosts
        self.ended: dict[int, list[int] | str] = {}
        self.failing = False
        self._specs = {
            m: Speculator(m, tiny_model(context=600), TOKENIZER, plan="fixed") for m in ("prompt-lookup", "ar")
        }
        super().__init__(self._made, 2, 64, telling=Telling(self.share, Wire(hosts, rank), TOKENIZER))

    def run(self) -> None:
        try:
            super().run()
        except Exception:
            self.model.barrier.abort()  # its connections close
            self.hosts.barrier.abort()
            raise

    def _made(self, method: str) -> Any:
        session = self._specs[method].session(2, context=400, piece=16)
        step = session.step

        def agreed() -> Any:
            if self.failing:
                raise MemoryError("only here")
            # As a round's agreement does.
            self.share.heard, _ = self.model.all(self.share.rank, "agree", self.share.said)
            return step()

        session.step = agreed
        return session

    def _end(self, ticket: Ticket, outcome: Result | Exception) -> None:
        self.ended[ticket.number] = outcome.token_ids if isinstance(outcome, Result) else type(outcome).__name__
        super()._end(ticket, outcome)


@contextlib.contextmanager
def sharing() -> Iterator[tuple[Process, Process]]:
    """Two workers that share a model."""
    model, hosts = Between(), Between()
    first, second = (Process(model, hosts, rank) for rank in range(2))
    first.start()
    second.start()
    try:
        yield first, second
    finally:
        first.close(0)
        wait_until(lambda: not second.alive)


def submitted(worker: Worker, key: tuple[int, int, bool], method: str = "ar") -> Submitted:
    return Submitted(worker, partial(request, *key), method)


def test_all_decode_what_the_first_is_asked_and_stop_where_it_is_cancelled():
    keys = [(i, 4 + 5 * i, i % 3 == 0) for i in range(8)]
    with sharing() as (first, second):
        each = [submitted(first, key, "ar" if i % 2 else "prompt-lookup") for i, key in enumerate(keys)]
        gone = submitted(first, (3, 300, False))
        wait_until(lambda: gone.ticket.began)
        each += [submitted(first, key) for key in keys[:3]]
        first.cancel(gone.ticket)
        for key, one in zip(keys + keys[:3], each, strict=True):
            assert one.end()[0] == alone(*key)
        tokens, _ = gone.end()
        assert len(tokens) < 300 and tokens == alone(3, 300)[: len(tokens)]
        first.close()
        wait_until(lambda: not second.alive)
    assert len(first.ended) == 12 and first.ended == second.ended


def test_rounds_without_news_exchange_nothing_more():
    with sharing() as (first, _):
        submitted(first, (1, 200, False)).end()
        assert len(first.model.calls) > 100 and len(first.hosts.calls) < 10, first.hosts.calls


def test_a_request_that_fails_everywhere_ends_alone():
    with sharing() as (first, second):
        other = submitted(first, (2, 30, False))
        bad = Ticket(_failing, "ar", lambda update: None, twin=_failing)
        first.submit(bad)
        assert other.end()[0] == alone(2, 30)
        wait_until(lambda: bad.number in second.ended)
        assert first.ended[bad.number] == second.ended[bad.number] == "NumericalError"
        assert submitted(first, (4, 5, False)).end()[0] == alone(4, 5)


def test_one_that_fails_alone_ends_all_and_those_who_wait_are_told():
    with sharing() as (first, second), pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading, "excepthook", lambda given: raised.append(given.exc_value))
        raised: list[BaseException] = []
        waiting = [submitted(first, (i, 300, False)) for i in range(4)]
        wait_until(lambda: waiting[0].ticket.began)
        second.failing = True
        assert all(isinstance(each.end()[1], PeerLost) for each in waiting)
        wait_until(lambda: len(raised) == 2)
        assert any("It has failed alone: MemoryError: only here" in str(error) for error in raised)
        with pytest.raises(LongdraftError):
            submitted(first, (1, 2, False))


def test_a_told_request_is_made_anew_each_time_and_its_tokenizer_is_not_told():
    telling, other = (Telling(Share(rank), Wire(Between(), rank), TOKENIZER) for rank in range(2))
    twin = Processed(Request([5, 6, 7], max_new_tokens=3, tenant="me"), [partial(_Stateful, TOKENIZER)])
    ticket = Ticket(lambda: pytest.fail("not here"), "ar", lambda update: None, twin=twin)
    telling._tell([Change("submit", ticket), Change("cancel", ticket), Change("close")])
    come, cancelled, closed = other._read(telling._message)
    assert come.ticket is cancelled.ticket is not ticket and closed == Change("close")
    once, again = come.ticket.request(), come.ticket.request()
    assert once.prompt == [5, 6, 7] and once.tenant == "me" and come.ticket.method == "ar"
    assert once.processors[0] is not again.processors[0] and once.processors[0].tokenizer is TOKENIZER
    del come, cancelled  # it has ended
    telling._tell([Change("cancel", ticket)])
    assert other._read(telling._message) == [Change("cancel")]


def _fails(input_ids, scores):
    raise NumericalError("nonsense")


def _failing() -> Request:
    return Request([1, 2, 3], max_new_tokens=9, processors=[_fails])


class _Stateful:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, input_ids, scores):
        return scores
