"""The engine thread: requests that arrive, are cancelled and end in any order get what they would get alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from longdraft import LongdraftError, PromptCache, Request, Speculator, Step
from longdraft.errors import NumericalError
from longdraft.serve import protocol, serving
from longdraft.serve.worker import RequestState, Restarted, Worker
from tests.serve.conftest import MODEL, TOKENIZER, make_service
from tests.serve.over_http import wait_until

SPECS = {m: Speculator(m, MODEL, TOKENIZER, plan="fixed") for m in ("prompt-lookup", "ar")}


def request(seed: int, length: int, sampled: bool = False) -> Request:
    prompt = [(seed + i * (1 + seed % 3)) % 61 for i in range(3 + seed % 40)]
    sampling = {"temperature": 0.9, "seed": seed} if sampled else {}
    return Request(prompt, max_new_tokens=length, eos_token_ids=[], **sampling)


@cache
def alone(seed: int, length: int, sampled: bool = False) -> list[int]:
    return SPECS["ar"].generate(request(seed, length, sampled))[0].token_ids


class Submitted:
    """A submitted request, and its updates."""

    def __init__(self, worker: Worker, make, method: str = "ar") -> None:
        self._updates: queue.Queue = queue.Queue()
        self.state = RequestState(make(), method, self._updates.put)
        worker.submit(self.state)

    def end(self):
        """Waits for the end. Returns the tokens, and the result or the error."""
        tokens: list[int] = []
        while True:
            update = self._updates.get(timeout=30)
            if isinstance(update, Step):
                tokens += update.token_ids
            elif isinstance(update, Restarted):
                tokens = []
            else:
                return tokens, update


@contextlib.contextmanager
def working(slots=2, size=64, timeout=5.0, **more) -> Iterator[Worker]:
    caches = {m: PromptCache() for m in SPECS}

    def session(method):
        return SPECS[method].session(slots, context=400, cache=caches[method], piece=16)

    worker = Worker(session, slots, size, **more)
    worker.start()
    try:
        yield worker
    finally:
        worker.close(timeout)


KEYS = st.tuples(st.integers(0, 30), st.integers(1, 25), st.booleans())


@settings(max_examples=15)
@given(
    asked=st.lists(st.tuples(KEYS, st.sampled_from(sorted(SPECS)), st.integers(0, 9)), min_size=1, max_size=9),
)
def test_requests_that_come_and_go_get_what_they_would_get_alone(asked):
    with working() as worker:
        submitted = []
        for key, method, leaves in asked:
            each = Submitted(worker, partial(request, *key), method)
            submitted.append((key, each))
            if leaves == 0:
                worker.cancel(each.state)
        for key, each in submitted:
            tokens, outcome = each.end()
            if each.state.cancelled:
                assert tokens == alone(*key)[: len(tokens)]
            else:
                assert tokens == alone(*key) == outcome.token_ids
        assert worker.load == (0, 0)


@pytest.mark.parametrize("turns", range(8))
def test_whoever_asked_may_leave_at_any_moment(turns):
    """Also in the iteration of the event loop in which a token arrives."""
    service = make_service()  # its worker does not run

    async def leave() -> bool:
        found = serving.create_chat_completion(
            service, protocol.ChatCompletionRequest(messages=[{"role": "user", "content": "who?"}])
        )
        found.submit()
        answer = asyncio.create_task(found.full_response())
        await asyncio.sleep(0.01)
        found.choices[0].listener(Step(0, (5,), 0, 0, 0, "full", 0.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        answer.cancel()
        await asyncio.wait((answer,), timeout=5)
        return answer.cancelled() and found.choices[0].cancelled

    assert asyncio.run(leave())


def test_memory_and_slots_do_not_grow_with_requests():
    def kept() -> Counter[str]:
        """Number of live objects of the engine, by class."""
        gc.collect()
        kinds = [type(each) for each in gc.get_objects()]
        return Counter(kind.__name__ for kind in kinds if kind.__module__.startswith("longdraft.engine"))

    found = []
    with working() as worker:
        for turn in range(30):
            submitted = [Submitted(worker, partial(request, i, 6)) for i in range(4)]
            for i, each in enumerate(submitted):
                if (turn + i) % 3 == 0:
                    worker.cancel(each.state)
            for each in submitted:
                each.end()
            del submitted, each
            wait_until(lambda: worker.load == (0, 0))
            if turn in (2, 29):
                found.append(kept())
    assert found[0] and found[0] == found[1]


def test_a_forward_that_fails_ends_the_request_that_made_it_fail_and_no_other():
    def fails(input_ids, scores):
        if input_ids.shape[1] > 8:
            raise NumericalError("nonsense")
        return scores

    with working(slots=3) as worker:
        first = Submitted(worker, partial(request, 2, 25))
        prompt = request(1, 20).prompt
        bad = Submitted(worker, lambda: Request(prompt, max_new_tokens=20, eos_token_ids=[], processors=[fails]))
        second = Submitted(worker, partial(request, 3, 25, True))
        assert isinstance(bad.end()[1], NumericalError)
        assert [first.end()[0], second.end()[0]] == [alone(2, 25), alone(3, 25, True)]
        assert Submitted(worker, partial(request, 4, 5)).end()[0] == alone(4, 5)


def test_a_request_that_cannot_be_used_is_told_so():
    with working() as worker:
        assert isinstance(Submitted(worker, lambda: Request([1, 2], max_new_tokens=5000)).end()[1], LongdraftError)


def test_what_was_decoded_last_is_kept_before_the_worker_ends():
    calls: list[int] = []

    def keep() -> bool:
        calls.append(len(calls))
        if len(calls) == 2:
            raise OSError("no space")
        return len(calls) % 5 > 0

    with working(on_idle=keep) as worker:
        submitted = Submitted(worker, partial(request, 1, 40))
        before = len(calls)
        worker.close()
        assert submitted.end()[0] == alone(1, 40) and len(calls) > before
