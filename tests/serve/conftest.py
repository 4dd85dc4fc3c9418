"""A server of a tiny model on a port of this machine, with the official client."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")
# ruff: noqa: E402

from longdraft import Speculator
from longdraft.serve.server import Server
from longdraft.serve.service import Service
from longdraft.serve.settings import ServerSettings
from tests.serve.over_http import http, wait_until
from tests.support.tiny import tiny_model, tiny_tokenizer

MODEL = tiny_model(context=600)
TOKENIZER = tiny_tokenizer(chat=True)


class Running:
    """A server, and its clients."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.server = Server(service, "127.0.0.1", 0, drain_timeout=20)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        service.worker.start()
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{self.server.port}"

    def client(self, key: str = "none") -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def chat(self, messages: list[dict[str, str]], key: str = "none", **options: Any) -> Any:
        return self.client(key).chat.completions.create(model="tiny", messages=messages, **options)

    def http(self, path: str, body: Any = None, timeout: float = 60) -> tuple[int, bytes]:
        return http(self.url + path, body, timeout)

    def becomes_idle(self) -> bool:
        wait_until(lambda: self.service.worker.load == (0, 0))
        return self.service.worker.alive

    def close(self) -> None:
        self.service.worker.close(0)
        self.server.should_exit = True
        self.thread.join(20)


def make_service(model: Any = MODEL, tokenizer: Any = TOKENIZER, **settings: Any) -> Service:
    usual = {"name": "tiny", "methods": ("prompt-lookup", "ar"), "slots": 3, "context": 600}
    options = ServerSettings(**usual | settings)

    def speculator(method: str) -> Speculator:
        earlier = {"earlier": options.earlier} if options.earlier and method == "prompt-lookup" else {}
        return Speculator(method, model, tokenizer, plan="fixed", **earlier)

    return Service(options, speculator, tokenizer)


@pytest.fixture
def serving() -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:

        def start(**settings: Any) -> Running:
            running = Running(make_service(**settings))
            stack.callback(running.close)
            return running

        yield start


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with contextlib.closing(Running(make_service())) as running:
        yield running
