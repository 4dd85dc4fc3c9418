"""A server whose model two processes share, under torchrun, answers like one of one process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from tests.serve.bytes import byte_model, byte_tokenizer
from tests.serve.conftest import Running, make_service
from tests.serve.over_http import http as ask
from tests.serve.over_http import wait_until

pytestmark = pytest.mark.slow
MODEL, TOKENIZER = byte_model(), byte_tokenizer()
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = [{"role": "user", "content": "what is this?"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "to be or not to be", "max_tokens": 40, "temperature": 0}),
    (TEXT, {"prompt": "abc " * 60, "max_tokens": 25, "temperature": 0, "method": "ar"}),
    (TEXT, {"prompt": "abc " * 60 + "d", "max_tokens": 25, "temperature": 1, "seed": 3, "top_p": 0.9}),
    (TEXT, {"prompt": ["one", "two"], "n": 2, "max_tokens": 12, "temperature": 0.8, "seed": 5}),
    (TEXT, {"prompt": "x", "max_tokens": 9, "temperature": 1, "seed": 1, "logprobs": 2, "frequency_penalty": 1}),
    (CHAT, {"messages": SAID, "max_tokens": 16, "temperature": 0, "logit_bias": {"9": 4, "12": -3}}),
    (CHAT, {"messages": SAID, "max_tokens": 30, "temperature": 0, "response_format": {"type": "json_object"}}),
]


class Shared:
    """Two processes that serve."""

    def __init__(self, folder: Path) -> None:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        serve = ["longdraft", "serve", "--model", str(folder), "--name", "tiny", "--port", "0", "--slots", "3"]
        out = subprocess.PIPE
        self.launcher = subprocess.Popen(
            [*run, *serve, "--method", "prompt-lookup,ar"], stdout=out, stderr=out, text=True
        )
        self.said = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        wait_until(lambda: "the API" in self.said or self.launcher.poll() is not None, 180)
        found = re.search(r"http://127\.0\.0\.1:\d+", self.said)
        assert found, self.said
        self.url = found[0]
        self.processes = psutil.Process(self.launcher.pid).children()

    def _read(self) -> None:
        assert self.launcher.stderr is not None
        for line in self.launcher.stderr:
            self.said += line

    def ended(self) -> str:
        """What was said, once all processes have ended; stdout is empty."""
        self.launcher.wait(60)
        self._reading.join(10)
        assert not any(each.is_running() for each in self.processes)
        assert self.launcher.stdout is not None and not self.launcher.stdout.read()
        return self.said

    def close(self) -> None:
        for each in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.launcher.kill()
        self.launcher.wait(20)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    MODEL.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with contextlib.closing(Shared(tmp_path)) as shared:
        yield shared


def answer(url: str, path: str, body: dict[str, Any]) -> Any:
    status, content = ask(url + path, {"model": "tiny", "ignore_eos": True, **body})
    assert status == 200, content
    return [(c.get("text") or c.get("message"), c["finish_reason"]) for c in json.loads(content)["choices"]]


def test_answers_are_those_of_one_process_whoever_comes_and_goes(shared):
    def leave(i: int) -> None:
        """Asks for a long text, and goes after some of it."""
        connection = http.client.HTTPConnection(shared.url.removeprefix("http://"), timeout=60)
        body = {"model": "tiny", "prompt": f"{i} away", "max_tokens": 400, "stream": True, "ignore_eos": True}
        connection.request("POST", TEXT, json.dumps(body), {"content-type": "application/json"})
        connection.getresponse().read(300)
        connection.close()

    def load() -> str:
        return ask(f"{shared.url}/ready")[1].decode()

    with ThreadPoolExecutor(12) as pool:
        leaving = [pool.submit(leave, i) for i in range(3)]
        asked = [pool.submit(answer, shared.url, *body) for body in [*BODIES, *reversed(BODIES)]]
        with contextlib.closing(Running(make_service(MODEL, TOKENIZER, context=1200))) as one:
            own = [answer(one.url, *body) for body in BODIES]
        assert [each.result() for each in asked] == [*own, *reversed(own)]
        for each in leaving:
            each.result()
    wait_until(lambda: '"running":0,"waiting":0' in load())
    assert answer(shared.url, *BODIES[0]) == own[0]

    shared.launcher.send_signal(signal.SIGINT)
    said = shared.ended()
    assert said.count("the API") == said.count("All requests have ended.") == 1
    assert "longdraft" not in said.split("All requests have ended.")[0].split("the API")[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_dies_all_end_and_say_why(shared, rank):
    (dies,) = (each for each in shared.processes if each.environ()["RANK"] == str(rank))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, shared.url + TEXT, {"prompt": "a", "max_tokens": 500, "ignore_eos": True})
        wait_until(lambda: '"running":1' in ask(f"{shared.url}/ready")[1].decode())
        os.kill(dies.pid, signal.SIGKILL)
        if rank == 1:
            assert asked.result()[0] == 503
        assert asked.exception() or rank == 1
    said = shared.ended()
    assert said.count("Another of the 2 processes that share the model has ended or does not answer") == 1
    assert f"so process {1 - rank} ends too" in said
