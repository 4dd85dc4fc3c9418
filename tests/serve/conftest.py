"""A server of a tiny model on a port of this machine, with the official client."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")
# ruff: noqa: E402

from longdraft import Speculator
from longdraft.serve.run import Server
from longdraft.serve.service import Service
from longdraft.serve.settings import Settings
from tests.tiny import tiny_model, tiny_tokenizer


class Running:
    """A server, and a client of it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.server = Server(service, "127.0.0.1", 0, drain=20)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        service.worker.start()
        self.thread.start()
        until = time.monotonic() + 20
        while not self.server.started and time.monotonic() < until:
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{self.server.port}"

    def client(self, key: str = "none", **options: Any) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def close(self) -> None:
        self.service.worker.close(0)
        self.server.should_exit = True
        self.thread.join(20)


MODEL = tiny_model(context=600)
TOKENIZER = tiny_tokenizer(chat=True)


def make_service(model: Any = MODEL, **over: Any) -> Service:
    settings = Settings(**({"name": "tiny", "methods": ("prompt-lookup", "ar"), "slots": 3, "context": 600} | over))

    def speculator(method: str) -> Speculator:
        earlier = {"earlier": settings.earlier} if settings.earlier and method == "prompt-lookup" else {}
        return Speculator(method, model, TOKENIZER, plan="fixed", **earlier)

    return Service(settings, speculator, TOKENIZER)


@pytest.fixture
def serving() -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:

        def start(**over: Any) -> Running:
            running = Running(make_service(**over))
            stack.callback(running.close)
            return running

        yield start


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    made = Running(make_service())
    yield made
    made.close()
