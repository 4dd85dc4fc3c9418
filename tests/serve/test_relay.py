"""The front of replicas: where a request goes, and what happens when a replica is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from longdraft.errors import CapabilityError, RequestError
from longdraft.serve.app import make_app
from longdraft.serve.cluster import connected, require
from longdraft.serve.relay import METRICS, Forwarded, Lost, Relay, answer
from longdraft.serve.replicas import Fleet, fleet
from longdraft.serve.worker import QueueFull
from tests.serve.conftest import make_service
from tests.serve.over_http import wait_until


def scope(path="/v1/chat/completions", method="POST"):
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
    }  # fmt: skip


def through(app, body=b"{}", **where):
    """Status and body of an answer."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope(**where), receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


class Replicas:
    """Answers in two pieces; the first ``lost`` of them are lost before it, and with ``torn`` in the middle of it."""

    def __init__(self, lost=0, torn=False, error=None):
        self.lost, self.torn, self.error, self.asked = lost, torn, error, 0

    async def __call__(self, request):
        self.asked += 1
        if self.error is not None:
            raise self.error
        yield {"type": "http.response.start", "status": 200, "headers": []}
        if self.asked <= self.lost:
            raise Lost
        yield {"type": "http.response.body", "body": b"one ", "more_body": True}
        if self.torn:
            raise Lost
        yield {"type": "http.response.body", "body": b"two"}


def turn(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({"prompt": "a" * 2000 + "b"}, {"prompt": "a" * 2000 + "c"}, True),
        ({"prompt": "ab"}, {"prompt": "ac"}, False),
        (
            {"messages": [turn("system", "s"), turn("user", "a")]},
            {"messages": [turn("user", "a"), turn("assistant", "b")]},
            True,
        ),
        ({"input": "a"}, {"input": [turn("user", "a")]}, True),
        ({"prompt": "a", "prompt_cache_key": "k"}, {"prompt": "b", "prompt_cache_key": "k"}, True),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}, False),
    ],
)
def test_requests_that_begin_alike_have_the_same_key(first, second, same):
    keys = {Forwarded.of(scope(), json.dumps(each).encode()).key for each in (first, second)}
    assert "" not in keys and (len(keys) == 1) == same


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages": 3}', b'{"messages": []}', b"[" * 100_000])
def test_malformed_bodies_are_left_for_the_replicas_to_refuse(body):
    replicas, given = Replicas(), []

    def ask(request):
        given.append(request)
        return replicas(request)

    assert through(Relay(ask), body) == (200, b"one two") and replicas.asked == 1
    assert given[0].body == body and given[0].key == Forwarded.of(scope(), body).key


def test_a_request_that_has_not_begun_goes_to_another_replica():
    replicas = Replicas(lost=2)
    assert through(Relay(replicas, pause=0)) == (200, b"one two") and replicas.asked == 3


def test_a_request_that_has_begun_ends_with_an_error():
    replicas = Replicas(torn=True)
    status, body = through(Relay(replicas, pause=0))
    assert status == 200 and body.startswith(b"one data: ") and b'"code": "lost"' in body and replicas.asked == 1


@pytest.mark.parametrize(
    ("replicas", "status"),
    [({"lost": 99}, 503), ({"error": QueueFull(3, 1.0)}, 429), ({"error": RuntimeError("x")}, 500)],
)
def test_a_request_that_no_replica_answers_ends_with_an_error(replicas, status):
    relay = Relay(Replicas(**replicas), pause=0)
    assert through(relay)[0] == status and relay.ongoing == 0


def test_draining_refuses_new_requests():
    relay = Relay(Replicas())
    assert through(relay, path="/ready", method="GET")[0] == 200
    relay.draining = True
    assert through(relay)[0] == 503 and b"shutting_down" in through(relay)[1]
    assert through(relay, path="/ready", method="GET")[0] == 503
    assert through(relay, path="/health", method="GET")[0] == 200


def test_the_front_is_ready_when_a_replica_is():
    running = []

    async def able():
        return bool(running)

    relay = Relay(Replicas(), able)
    assert through(relay, path="/ready", method="GET")[0] == 503
    assert through(relay, path="/health", method="GET")[0] == 200
    running.append("a replica")
    assert through(relay, path="/ready", method="GET")[0] == 200


def test_metrics_of_all_replicas_are_on_one_page():
    page = '# HELP longdraft:{0} Counted.\n# TYPE longdraft:{0} counter\nlongdraft:{0}_total{{model_name="m"}} {1}\n'

    async def ask(request):
        name = json.loads(request.body)["prompt"]
        yield {"type": "http.response.start", "status": 200, "headers": []}
        yield {"type": "http.response.body", "body": b"said"}
        made, count = (2.0, 1.0) if name == "b" else (1.0, 3.0)
        yield {"type": METRICS, "replica": "a", "made": made, "page": page.format("asked", 7 * made)}  # the later one
        yield {"type": METRICS, "replica": name, "made": made, "page": page.format("asked", count)}

    relay = Relay(ask)
    for name in ("b", "one", "b"):
        assert through(relay, json.dumps({"prompt": name}).encode()) == (200, b"said")
    status, found = through(relay, path="/metrics", method="GET")
    lines = [line for line in found.decode().splitlines() if not line.startswith("#")]
    assert status == 200 and found.count(b"# TYPE longdraft:asked_total counter") == 1
    counts = {"a": 14.0, "b": 1.0, "one": 3.0}
    assert lines == [f'longdraft:asked_total{{model_name="m",replica="{name}"}} {n}' for name, n in counts.items()]


def test_the_application_answers_and_a_client_that_leaves_ends_its_request():
    service = make_service()
    app = make_app(service)
    service.worker.start()
    body = {"messages": [turn("user", "who?")], "temperature": 0, "max_tokens": 5}

    async def leave():
        stream = json.dumps(body | {"max_tokens": 500, "stream": True}).encode()
        async with contextlib.aclosing(answer(app, Forwarded.of(scope(), stream))) as messages:
            async for message in messages:
                if message["type"] == "http.response.body":
                    break
            assert sum(service.worker.load) == 1
        await asyncio.to_thread(wait_until, lambda: sum(service.worker.load) == 0)

    try:
        relay = Relay(lambda request: answer(app, request))
        status, found = through(relay, json.dumps(body).encode())
        assert status == 200 and json.loads(found)["usage"]["completion_tokens"] == 5
        assert through(relay, b"{")[0] == 400 and through(relay, path="/v1/models", method="GET")[0] == 200
        asyncio.run(leave())
    finally:
        service.worker.close(0)


def test_a_fleet_has_the_given_replicas_and_options(tmp_path):
    assert fleet("2", None, False, 3) == Fleet(2, 2, 3, 0)
    scaled = fleet("1-4", None, True, None)
    assert scaled == Fleet(1, 4, 1, 1)
    options = scaled.options(slots=4, queue=8, drain=9)
    assert options["autoscaling_config"]["max_replicas"] == 4 and "num_replicas" not in options
    pytest.importorskip("yaml")
    file = tmp_path / "options.yaml"
    file.write_text("num_replicas: 3\nmax_ongoing_requests: 5\n")
    options = fleet("1-4", file, False, 1).options(4, 8, 9)
    assert (options["num_replicas"], options["max_ongoing_requests"]) == (3, 5) and "autoscaling_config" not in options


@pytest.mark.parametrize("replicas", ["0", "x", "4-2", "-1", "0-0"])
def test_wrong_numbers_of_replicas_are_refused(replicas):
    with pytest.raises(RequestError, match="--replicas"):
        fleet(replicas, None, False, 1)


@pytest.mark.parametrize("content", ["- 1\n", None])
def test_a_file_without_options_is_refused(tmp_path, content):
    pytest.importorskip("yaml")
    if content is not None:
        (tmp_path / "options").write_text(content)
    with pytest.raises(RequestError, match="--ray-config"):
        fleet("1", tmp_path / "options", False, 1)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CapabilityError, match=r"longdraft\[ray\]"):
        connected()


def test_more_processes_than_there_are_processors_are_refused(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0})
    require(ray, 2, 1, 0)
    for wanted, kind in (((2, 3, 0), "CPU"), ((1, 1, 1), "GPU")):
        with pytest.raises(CapabilityError, match=kind):
            require(ray, *wanted)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    require(ray, 9, 9, 9)
