"""The engine thread: requests that arrive, are cancelled and end in any order get what they would get alone."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Iterator
from functools import cache, partial

import pytest

pytest.importorskip("fastapi")

from longdraft import LongdraftError, PromptCache, Request, Speculator, Step
from longdraft.errors import NumericalError
from longdraft.serve import protocol, serving
from longdraft.serve.worker import RequestState, Restarted, Worker
from tests.serve.conftest import MODEL, TOKENIZER, make_service

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


def test_requests_that_come_and_go_get_what_they_would_get_alone():
    keys = [(i, 1 + i * 5 % 23, i % 3 == 1) for i in range(12)]
    with working() as worker:
        submitted = [Submitted(worker, partial(request, *key), sorted(SPECS)[i % 2]) for i, key in enumerate(keys)]
        for each in submitted[::4]:
            worker.cancel(each.state)
        for key, each in zip(keys, submitted, strict=True):
            tokens, outcome = each.end()
            if each.state.cancelled:
                assert tokens == alone(*key)[: len(tokens)]
            else:
                assert tokens == alone(*key) == outcome.token_ids
        assert worker.load == (0, 0)


@pytest.mark.parametrize("turns", range(0, 8, 2))
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
        unusable = Submitted(worker, lambda: Request([1, 2], max_new_tokens=5000))
        assert isinstance(unusable.end()[1], LongdraftError)


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
