"""Requests of browsers: the ``Host`` header, and pages of other origins."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

from longdraft.serve.settings import LOCAL_HOSTS

HERE, THERE = "http://localhost:3000", "https://elsewhere.example"
CHAT = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 3}


def send(running, method="GET", path="/v1/models", body=None, **headers):
    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=30)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        headers["content-type"] = "application/json"
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()


WRONG = "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]:80"


def test_a_name_that_is_not_the_servers_is_refused_everywhere(serving):
    running = serving(hosts=LOCAL_HOSTS)
    for path in ("/", "/v1/models", "/health", "/metrics", "/nothing"):
        for name in WRONG:
            status, _, body = send(running, path=path, host=name)
            assert status == 403 and json.loads(body)["error"]["code"] == "host", name
        for name in ("localhost", "LOCALHOST:1234", "127.0.0.1:80", "[::1]:8000", "localhost."):
            assert send(running, path=path, host=name)[0] in (200, 404), name
    # Before a key is looked at.
    running = serving(keys={"me": "secret"}, hosts=("box.example", "*.lan"))
    key = {"authorization": "Bearer secret"}
    assert send(running, host="evil.example", **key)[0] == 403
    assert send(running, host="box.example", **key)[0] == send(running, host="a.lan", **key)[0] == 200
    assert send(running, host="box.example")[0] == 401
    # One that listens everywhere goes by every address and by no name.
    running = serving(hosts=("0.0.0.0",))
    assert [send(running, host=h)[0] for h in ("192.168.1.7:8000", "[fe80::1]:8000", "face.example")] == [200, 200, 403]
    assert send(serving(hosts=("*",)), host="any.example")[0] == 200


def test_no_other_origin_reads_answers_by_default(running):
    status, headers, _ = send(running, origin=HERE)
    assert status == 200 and not any("access-control" in name for name in headers)
    status, headers, _ = send(
        running, "OPTIONS", "/v1/chat/completions", origin=HERE, access_control_request_method="POST"
    )
    assert status >= 400 and not any("access-control" in name for name in headers)


def test_an_origin_that_is_allowed_asks_and_reads_refusals_too(serving):
    running = serving(origins=(HERE,), keys={"me": "secret"})
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,content-type"}
    status, headers, _ = send(running, "OPTIONS", "/v1/chat/completions", origin=HERE, **asked)
    assert status == 200 and headers["access-control-allow-origin"] == HERE
    assert "authorization" in headers["access-control-allow-headers"].lower()
    for key, code in (("Bearer secret", 200), ("Bearer wrong", 401)):
        status, headers, _ = send(running, "POST", "/v1/chat/completions", CHAT, origin=HERE, authorization=key)
        assert (status, headers["access-control-allow-origin"]) == (code, HERE)
    streamed = send(
        running, "POST", "/v1/chat/completions", CHAT | {"stream": True}, origin=HERE, authorization="Bearer secret"
    )
    assert streamed[1]["access-control-allow-origin"] == HERE and streamed[2].endswith(b"data: [DONE]\n\n")
    assert send(running, "OPTIONS", "/v1/chat/completions", origin=THERE, **asked)[0] == 400
    assert "access-control-allow-origin" not in send(running, origin=THERE, authorization="Bearer secret")[1]


def test_nothing_loads_scripts_from_elsewhere(running):
    assert send(running, path="/docs")[0] == send(running, path="/redoc")[0] == 404
    assert b'src="http' not in send(running, path="/")[2]
