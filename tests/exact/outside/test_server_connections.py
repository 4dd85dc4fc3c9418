"""Connections that never become requests: they end, and they keep nobody out; and the log stays small."""

from __future__ import annotations

import contextlib
import gzip
import http.client as http_client
import json
import logging
import os
import re
import signal
import socket
import time
import zlib

import pytest

pytest.importorskip("fastapi")

from tests.cli.conftest import model_folder
from tests.serve.conftest import Running, make_service
from tests.serve.over_http import http
from tests.support import elsewhere

__all__ = ["model_folder"]  # a fixture

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-le"


def connected(port: int, sent: bytes = b"") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=10)
    one.sendall(sent)
    return one


def closed(one: socket.socket) -> bool:
    with one:
        try:
            while one.recv(1000):
                pass
            return True
        except ConnectionError:
            return True


def test_headers_have_a_limit_of_time():
    with contextlib.closing(Running(make_service(body_timeout=0.3))) as running:
        for sent in (b"", HALF, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + HALF):
            one = connected(running.server.port, sent)
            if sent.startswith(b"GET"):
                assert b" 200 " in one.recv(5000)
            for _ in range(4):  # a letter now and then helps nobody
                with contextlib.suppress(OSError):
                    one.send(b"x" if sent else b"")
                time.sleep(0.05)
            assert closed(one)
        assert running.http("/health")[0] == 200


def test_connections_that_ask_nothing_keep_nobody_out():
    with (
        contextlib.closing(Running(make_service(body_timeout=20, connections=8))) as running,
        contextlib.ExitStack() as stack,
    ):
        ones = [stack.enter_context(connected(running.server.port, HALF)) for _ in range(40)]
        for _ in range(3):
            assert running.http("/health")[0] == 200
        assert len(running.server.server_state.connections) <= 8 and closed(ones[0])


def test_a_flood_of_nonsense_leaves_a_short_log(caplog):
    with contextlib.closing(Running(make_service())) as running:
        with caplog.at_level(logging.WARNING, "uvicorn.error"):
            for _ in range(300):
                with connected(running.server.port, b"nonsense\r\n\r\n") as one:
                    assert b" 400 " in one.recv(200)
        assert len([r for r in caplog.records if r.name == "uvicorn.error"]) <= 100
        assert running.http("/health")[0] == 200


def _serve(words):
    import resource

    from longdraft.cli.main import main

    resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
    os.environ["COLUMNS"] = "200"
    raise SystemExit(main(["serve", *words]))


@pytest.mark.slow
def test_more_connections_than_files_end_nothing(model_folder, tmp_path):
    pytest.importorskip("resource")
    said, address = tmp_path / "said", None
    run = elsewhere.start(
        said, _serve, ["--model", str(model_folder), "--port", "0", "--plan", "fixed", "--slots", "1"]
    )
    try:
        while not address:
            assert run.is_alive(), said.read_text()
            time.sleep(0.02)
            address = said.exists() and re.search(r"(http://127\.0\.0\.1:(\d+))/v1", said.read_text())
        with contextlib.ExitStack() as stack:
            for _ in range(600):
                stack.enter_context(connected(int(address[2]), HALF))
            body = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 5}
            status, answer = http(f"{address[1]}/v1/chat/completions", body)
            assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] <= 5
        assert len(said.read_bytes()) < 100_000
        os.kill(run.pid, signal.SIGTERM)
        assert elsewhere.wait_for_exit(run, 30) == 0
    finally:
        run.kill()


# --- forms of HTTP ---

ASKED = json.dumps({"messages": [{"role": "user", "content": "who?"}], "max_tokens": 3, "temperature": 0}).encode()
RAW = zlib.compressobj(wbits=-15)
CODED = {"gzip": gzip.compress(ASKED), "x-gzip": gzip.compress(ASKED), "deflate": zlib.compress(ASKED),
         "Deflate": RAW.compress(ASKED) + RAW.flush(), "identity": ASKED}  # fmt: skip


@pytest.fixture(scope="module")
def running():
    with contextlib.closing(Running(make_service(max_body_bytes=50_000))) as running:
        yield running


def post(running, body, coding):
    return http(f"{running.url}/v1/chat/completions", body, **{"content-encoding": coding})


REFUSED = [
    ("gzip", gzip.compress(b"a" * 50_001), 413), ("gzip", gzip.compress(b"a" * 10**8), 413),
    ("deflate", zlib.compress(b"a" * 10**8), 413), ("gzip", CODED["gzip"][:-9], 400),
    ("gzip", CODED["gzip"] + b"more", 400), ("gzip", CODED["gzip"] * 2, 400), ("gzip", ASKED, 400),
    ("deflate", b"", 400), ("br", ASKED, 415), ("gzip, gzip", gzip.compress(CODED["gzip"]), 415),
    ("nonsense", ASKED, 415),
]  # fmt: skip


def test_bodies_come_coded_and_are_refused_if_they_cannot_be_decoded_or_grow_too_large(running):
    plain = json.loads(post(running, ASKED, "")[1])["choices"]
    for coding, body in CODED.items():
        status, answer = post(running, body, coding)
        assert status == 200 and json.loads(answer)["choices"] == plain, coding
    for coding, body, expected in REFUSED:
        status, answer = post(running, body, coding)
        assert status == expected and json.loads(answer)["error"]["message"], coding
    assert running.http("/health")[0] == 200


def sent(running, *head, body=b""):
    """Status, headers and body of the answer to a request as it stands on the wire."""
    lines = [*head, "Connection: close"] + [f"Content-Length: {len(body)}"] * bool(body)
    with connected(running.server.port, ("\r\n".join(lines) + "\r\n\r\n").encode() + body) as one:
        answer = b"".join(iter(lambda: one.recv(65536), b""))
    first, *headers = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return int(first.split()[1]), dict(each.lower().split(": ", 1) for each in headers)


def test_a_target_may_be_absolute_and_passes_no_guard(running):
    for target in ("http://127.0.0.1/health", "HTTP://me@127.0.0.1:8/health?a=b", "http://127.0.0.1"):
        assert sent(running, f"GET {target} HTTP/1.1", "Host: 127.0.0.1")[0] == 200
    with contextlib.closing(Running(make_service(hosts=("localhost",), keys={"me": "secret"}))) as guarded:
        for target, status in (
            ("http://localhost/v1/models", 401), ("http://evil.example/health", 403), ("http://localhost/health", 200),
            ("http://localhost@evil.example/health", 403), ("ftp://localhost/health", 401),
        ):  # fmt: skip
            assert sent(guarded, f"GET {target} HTTP/1.1", "Host: localhost")[0] == status, target


def test_a_wrong_method_is_told_which_are_right_and_a_coding_without_a_body_is_passed_over(running):
    wrong = [(method, "/v1/chat/completions", "post") for method in ("GET", "OPTIONS", "DELETE", "HEAD")]
    allowed = {"/v1/models": "get, head", "/": "get, head", "/v1/messages": "head, post"}
    for method, path, right in (*wrong, *(("DELETE", path, right) for path, right in allowed.items())):
        status, headers = sent(running, f"{method} {path} HTTP/1.1", "Host: localhost")
        assert (status, headers["allow"]) == (405, right), (method, path)
    for coding in ("gzip", "br"):
        assert sent(running, "GET /v1/models HTTP/1.1", "Host: localhost", f"Content-Encoding: {coding}")[0] == 200


def chunks(size):
    return (b"a" * min(65536, size - at) for at in range(0, size, 65536))


@pytest.mark.parametrize("of", [bytes, chunks], ids=["whole", "chunked"])
def test_who_still_sends_a_refused_body_gets_the_answer(of):
    """And not a reset: the body is larger than what the sockets' buffers hold."""
    with contextlib.closing(Running(make_service(hosts=("localhost",), keys={"me": "secret"}))) as guarded:
        for headers, size, status in (
            ({}, 9_000_000, 401), ({"Host": "evil.example"}, 9_000_000, 403),
            ({"Authorization": "Bearer secret"}, 30_000_000, 413),
        ):  # fmt: skip
            with contextlib.closing(http_client.HTTPConnection("127.0.0.1", guarded.server.port, timeout=30)) as one:
                one.request("POST", "/v1/messages", of(size), {"Host": "localhost", **headers})
                answer = one.getresponse()
                assert answer.status == status and json.loads(answer.read())["error"]["message"]
