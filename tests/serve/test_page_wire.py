"""What the page reads off the wire: the canned server of its tests writes what the real one writes, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.over_http import http
from tests.serve.page_server import METHODS, CannedServer

CHAT = "v1/chat/completions"
# As the page asks (page.html), of a text that repeats itself.
ASKED = {
    "messages": [{"role": "user", "content": "the sea " * 40}], "temperature": 0, "max_tokens": 30, "stream": True,
    "ignore_eos": True, "stream_options": {"include_usage": True, "include_trace": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def canned() -> Iterator[CannedServer]:
    with CannedServer() as server:
        yield server


def events(url: str) -> list[Any]:
    status, answer = http(url + CHAT, ASKED)
    lines = [line[6:] for line in answer.decode().split("\n") if line.startswith("data: ")]
    assert status == 200 and lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def shape(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Where a value has which kinds of JSON; the elements of a list count as one place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from shape(inner, f"{where}.{key}")
    elif isinstance(value, list):
        yield where, "list"
        for inner in value:
            yield from shape(inner, f"{where}[]")
    else:
        yield where, "number" if type(value) in (int, float) else type(value).__name__


def of_kind(found: list[Any], kind: str) -> list[Any]:
    if kind == "usage":
        return [e for e in found if e.get("usage")]
    if kind == "end":
        return [e for e in found if e["choices"] and e["choices"][0]["finish_reason"]]
    return [e for e in found if e.get("trace", {}).get("phase") == kind]


@pytest.mark.parametrize("kind", ["prefill", "round", "end", "usage"])
def test_the_events_of_a_stream(running, canned, kind):
    ours, theirs = (of_kind(events(url), kind) for url in (f"{running.url}/", canned.url))
    assert ours and theirs
    shapes, stand_in = ({place for e in each for place in shape(e)} for each in (ours, theirs))
    assert stand_in - shapes == set()
    if kind == "round":  # and what they say is of one piece
        sources = {source for e in ours for _, source in e["trace"]["pieces"]}
        trees = [e["trace"]["tree"] for e in ours if e["trace"]["tree"]]
        assert sources == {"lookup", "target"} and any(len(tree["accepted"]) > 1 for tree in trees)
        assert all(tree["parents"][0] == -1 and tree["accepted"][0] == 0 for tree in trees)


def test_the_kinds_of_a_stream_come_in_the_same_order(running, canned):
    def order(url: str) -> list[str]:
        found = events(url)
        kinds = [k for e in found for k in ("prefill", "round", "end", "usage") if e in of_kind(found, k)]
        return [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]

    assert order(f"{running.url}/") == order(canned.url) == ["prefill", "round", "end", "usage"]


def test_models_and_errors(serving, canned):
    real = serving(keys={"me": "secret"})
    about = set(shape(json.loads(http(f"{real.url}/v1/models", authorization="Bearer secret")[1])))
    assert set(shape(json.loads(http(f"{canned.url}v1/models")[1]))) <= about
    canned.key = "secret"
    try:
        for path, wanted in (("v1/models", 401), ("nothing", 404)):
            key = {} if wanted == 401 else {"authorization": "Bearer secret"}
            (status, own), (other, canned_one) = (http(url + path, **key) for url in (f"{real.url}/", canned.url))
            assert status == other == wanted
            assert json.loads(own)["error"].keys() == json.loads(canned_one)["error"].keys()
    finally:
        canned.key = ""
    too_long = {"messages": [{"role": "user", "content": "refuse " * 200}]}
    (status, own), (other, canned_one) = (
        http(url + CHAT, too_long, authorization="Bearer secret") for url in (f"{real.url}/", canned.url)
    )
    assert status == other == 400 and json.loads(own)["error"].keys() == json.loads(canned_one)["error"].keys()
    assert len(METHODS) > 1
