"""``longdraft bench length``: break-even of methods here, and of servers."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from longdraft.bench import tasks
from longdraft.bench.acceptance import Accepted
from longdraft.bench.experiment import Experiment
from longdraft.bench.length import doubled
from longdraft.bench.servers import Server, Servers
from longdraft.errors import CapabilityError


def last(ended):
    return json.loads(ended.out.splitlines()[-1])


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"five six {i} " * 40, "dataset": "made-up"}) for i in range(2)))
    return path


def test_break_even_here(shell, model_folder, data_file, tmp_path):
    pytest.importorskip("matplotlib")
    given = ("bench", "length", "--model", model_folder, "--data", data_file, "--methods", "prompt-lookup", "-n", 8,
             "--ignore-eos", "--lengths", "64,128", "--results", tmp_path / "r.jsonl", "--json")  # fmt: skip
    ended = shell(*given, "--svg", tmp_path / "r.svg")
    found = last(ended)
    assert ended.code == 0, ended.err
    assert [(r["method"], r["length"]) for r in found["rows"]] == [
        (name, n) for n in (64, 128) for name in ("ar", "prompt-lookup")
    ]
    for row in found["rows"]:
        # A round's seconds over a step's, from which accepted length and speed-up follow.
        assert row["break_even"] > 0 and row["prompts"] == 2
        if row["method"] == "ar":
            assert row["break_even"] == pytest.approx(1.0) and row["mean_accepted_length"] == 1.0
    assert {row["length"] for row in found["free"]} <= {64, 128} and all(
        row["break_even"] >= 1 for row in found["free"]
    )
    assert "accepted / break-even" in ended.out and "8 rows, free" in ended.out
    assert (tmp_path / "r.svg").read_bytes().startswith(b"<?xml")
    again = shell(*given)
    assert "8 runs are in" in again.err and last(again)["rows"] == found["rows"]


def test_lengths_double():
    assert doubled(1024, 8192) == (1024, 2048, 4096, 8192)
    assert doubled(1024, 5000) == (1024, 2048, 4096, 5000)
    assert doubled(1024, 512) == (512,)


class Stub(BaseHTTPRequestHandler):
    """A server that drafts: of five tokens behind the first, three were drafted. It says so in a way of its own."""

    says = "llama.cpp"
    accepted = 0

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.path == "/metrics" and self.says != "counters":
            self.send_error(404)
            return
        count = type(self).accepted
        body = {
            "/v1/models": json.dumps({"data": [{"id": "stub"}]}),
            "/metrics": f'# HELP\nvllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {float(count)}\n',
        }[self.path]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream"] and asked["temperature"] == 0
        type(self).accepted += 3
        self.send_response(200)
        self.end_headers()
        for text in ("one", " two three", " four five six"):
            chunk = {"choices": [{"delta": {"content": text}}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        end = {"choices": [], "usage": {"prompt_tokens": len(asked["messages"][0]["content"]), "completion_tokens": 6}}
        if self.says == "llama.cpp":
            end["timings"] = {"draft_n": 4, "draft_n_accepted": 3}
        self.wfile.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())


@pytest.fixture(params=["llama.cpp", "counters", "nothing"])
def stub(request):
    handler = type("Handler", (Stub,), {"says": request.param, "accepted": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield request.param, f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_servers(shell, stub, data_file, tmp_path):
    says, url = stub
    ended = shell("bench", "length", "--url", f"ar={url}", "--url", f"drafts={url}", "--data", data_file, "--lengths",
                  "64", "--limit", 1, "--results", tmp_path / "r.jsonl", "--json")  # fmt: skip
    assert ended.code == 0, ended.err
    plain, drafts = last(ended)["rows"]
    assert plain["mean_accepted_length"] == 1.0
    assert drafts["mean_accepted_length"] == (None if says == "nothing" else 2.5)
    if says != "nothing":
        assert drafts["break_even"] == pytest.approx(2.5 / drafts["speedup_vs_ar"])
    assert drafts["context_tokens"] > 64 and drafts["ttft_seconds"] > 0 and drafts["tokens_per_second"] > 0
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1 + 2


def test_needles_stay_in_a_text_that_is_cut_for_servers():
    asked: list[str] = []

    class Recording:
        name, model, url = "ar", "stub", "http://stub"

        def answer(self, asked_for, prompt, *more):
            asked.append(prompt)
            return Accepted(asked_for, len(prompt), 2, 2, (), 0.1, 0.1)

    samples = tasks.read(["niah_single"], 1)
    experiment = Experiment(Servers([Recording()], [200], 4).steps(samples), lambda run: run.asked)
    assert len(list(experiment.run(lambda what: lambda name: None))) == 1 and len(asked[0]) < 1000
    assert samples[0].needles[0][1] in asked[0]


def test_a_server_that_is_not_there(shell, data_file):
    with pytest.raises(CapabilityError, match="cannot be reached"):
        Server("x", "http://127.0.0.1:9")
    ended = shell("bench", "length", "--url", "http://127.0.0.1:9", "--data", data_file)
    assert ended.code == 2 and "cannot be reached" in ended.err
