"""Half an hour of clients that ask, vanish, send half a body or ten megabytes: answers are right, and nothing grows."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import statistics
import threading
import time
from collections import Counter

import psutil
import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from longdraft import Request, Speculator
from tests.serve.conftest import MODEL, TOKENIZER, Running, make_service

# ruff: noqa: E402
MINUTES = float(os.environ.get("LONGDRAFT_SOAK_MINUTES", "30"))
# Minutes before memory is measured: caches fill, and lookups take in their first texts.
WARM_UP = 2.0
PLAIN = Speculator("ar", MODEL, TOKENIZER, plan="fixed")
KEYS = {"a": "key-a", "b": "key-b"}
WORDS = ["sea", "ship", "whale", "wind", "rope", "sail"]
KINDS = {"ask": 8, "stream": 4, "vanish": 3, "half": 1, "huge": 1, "refused": 1}


class Soak:
    """Clients of a server, each a thread, and what became of their requests."""

    def __init__(self, running: Running, until: float) -> None:
        self.running, self.until = running, until
        self.count: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._expected: dict[tuple[int, int], str] = {}
        self._lock = threading.Lock()

    def client(self, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self.until:
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                getattr(self, kind)(rng)
                self.count[kind] += 1
            except openai.RateLimitError:
                self.count["429"] += 1
            except Exception as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            time.sleep(rng.random() * 0.3)

    def messages(self, number: int):
        words = random.Random(number).choices(WORDS, k=5 + number * 7 % 60)
        return [{"role": "user", "content": " ".join(words) + "?"}]

    def request(self, rng, **more):
        """An answer, and what it was asked for."""
        number, tokens, key = rng.randrange(40), rng.choice((8, 24)), rng.choice(list(KEYS.values()))
        method = {"method": rng.choice(("prompt-lookup", "ar"))}
        answer = self.running.chat(
            self.messages(number), key, max_tokens=tokens, temperature=0, extra_body=method, **more
        )
        return answer, (number, tokens)

    def ask(self, rng) -> None:
        answer, asked = self.request(rng)
        self.check(answer.choices[0].message.content, *asked)

    def stream(self, rng) -> None:
        chunks, asked = self.request(rng, stream=True)
        self.check("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), *asked)

    def check(self, text: str, number: int, tokens: int) -> None:
        with self._lock:
            if (number, tokens) not in self._expected:
                prompt = TOKENIZER.apply_chat_template(
                    self.messages(number), add_generation_prompt=True, return_dict=False
                )
                self._expected[number, tokens] = PLAIN.generate(Request(prompt, max_new_tokens=tokens))[0].text
        if text != self._expected[number, tokens]:
            self.wrong.append(f"{number}, {tokens}: {text!r}")

    def vanish(self, rng) -> None:
        chunks, _ = self.request(rng, stream=True)
        for _ in range(rng.randrange(3)):
            next(iter(chunks), None)
        chunks.close()

    def half(self, rng) -> None:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-a\r\n"
        with socket.create_connection(("127.0.0.1", self.running.server.port)) as connection:
            connection.sendall(head + b'content-length: 900\r\n\r\n{"messages": [')
            time.sleep(rng.random() * 0.5)

    def huge(self, rng) -> None:
        with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
            self.running.chat([{"role": "user", "content": "a" * 10_000_000}], "key-a")

    def refused(self, rng) -> None:
        with pytest.raises(openai.APIStatusError):
            self.running.client("wrong").models.list()


@pytest.mark.slow
def test_a_soak():
    memory, process = [], psutil.Process()
    service = make_service(keys=KEYS, queue=32, earlier=2000, body_seconds=5.0)
    with contextlib.closing(Running(service)) as running:
        soak = Soak(running, time.monotonic() + 60 * (WARM_UP + MINUTES))
        clients = [threading.Thread(target=soak.client, args=(seed,), daemon=True) for seed in range(6)]
        for client in clients:
            client.start()
        time.sleep(60 * WARM_UP)
        while time.monotonic() < soak.until:
            time.sleep(min(10.0, max(0.1, MINUTES * 6)))
            memory.append(process.memory_info().rss)
        for client in clients:
            client.join(60)
        assert not any(client.is_alive() for client in clients)
        assert not soak.wrong, soak.wrong[:5]
        assert KINDS.keys() <= soak.count.keys(), soak.count
        assert running.becomes_idle()
        soak.ask(random.Random(1))
        # Memory is flat by the medians of quarters, as bodies of 10 MB come and go.
        n = len(memory)
        quarters = [statistics.median(memory[i * n // 4 : (i + 1) * n // 4]) / 2**20 for i in range(4)]
        print(dict(soak.count), "MiB, medians of quarters:", *map(round, quarters))
        assert quarters[3] < quarters[1] + 40
