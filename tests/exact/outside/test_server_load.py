"""A server that runs on: readers that read nothing delay nobody, and requests of every kind leave no memory behind."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.serve.conftest import Running, make_service
from tests.serve.over_http import http

PROMPT = "and so it goes on and on and so it goes "


def unread(port: int, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request, whose answer waits for a reader."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", port))
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(content)}"
    one.sendall(head.encode() + b"\r\n\r\n" + content)
    return one


def test_a_reader_that_reads_nothing_delays_nobody():
    prompt = {"model": "tiny", "prompt": PROMPT}
    long = prompt | {"max_tokens": 300, "n": 8, "logprobs": 5, "stream": True, "ignore_eos": True}
    with contextlib.closing(Running(make_service(slots=2))) as running:
        closed, late = (unread(running.server.port, long) for _ in range(2))
        # Other requests take turns with them, and the memory of what they do not read is bounded by max_tokens.
        for _ in range(3):
            status, answer = running.http("/v1/completions", prompt | {"max_tokens": 8, "ignore_eos": True})
            assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 8
        closed.close()
        # One that reads late gets all of its answer.
        received = b""
        late.settimeout(60)
        while b"[DONE]" not in received[-100:]:
            part = late.recv(1 << 16)
            assert part
            received += part
        late.close()
        assert received.count(b'"finish_reason": "length"') == 8
        assert running.becomes_idle()


@pytest.mark.slow
def test_requests_of_every_kind_leave_no_memory_behind():
    # Caches are bounded: these bounds are reached in the first rounds.
    with contextlib.closing(Running(make_service(earlier=64, prefix_cache_bytes=1 << 20))) as running:

        def round_of_requests(number: int) -> None:
            text = f"{number} {PROMPT}"
            chat = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
            bodies = [
                ("/v1/completions", {"model": "tiny", "prompt": [text, text + "x"], "max_tokens": 12, "logprobs": 3}),
                ("/v1/chat/completions", chat),
                ("/v1/chat/completions", chat | {"stream": True, "temperature": 1.0, "seed": number}),
                ("/v1/responses", {"model": "tiny", "input": text, "max_output_tokens": 8, "store": False}),
                ("/v1/messages", chat),
                ("/v1/completions", {"model": "tiny", "prompt": text * 40, "max_tokens": 8}),  # too long
                ("/v1/completions", {"model": "another", "prompt": text}),
            ]
            statuses = [
                http(running.url + path, body, 60, **{"x-session-id": f"s{number}"})[0] for path, body in bodies
            ]
            assert statuses == [200] * 5 + [400, 404]
            unread(running.server.port, bodies[0][1] | {"stream": True, "max_tokens": 300}).close()

        figures = []
        for turn in range(4):
            for number in range(60):
                round_of_requests(turn * 60 + number)
            assert running.becomes_idle()
            gc.collect()
            figures.append((len(gc.get_objects()), int(Path("/proc/self/statm").read_text().split()[1]) * 4096))
        _, (objects, memory), _, (objects_at_end, memory_at_end) = figures
        assert objects_at_end < objects * 1.02 and memory_at_end < memory + (24 << 20), figures
