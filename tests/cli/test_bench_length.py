"""``longdraft bench acceptance`` and ``bench length``: drafts and servers against the length of the text."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from longdraft import Speculator
from longdraft.bench import tasks
from longdraft.bench.acceptance import Accepted
from longdraft.bench.experiment import Experiment
from longdraft.bench.length import doubled
from longdraft.bench.servers import Server, steps
from longdraft.errors import CapabilityError


@pytest.fixture
def data_file(tmp_path):
    rows = [{"context": f"five six {i} " * n, "input": "why?", "dataset": "made-up"} for i, n in enumerate((60, 20))]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def measured(shell, model_folder, data_file):
    def run(verb, *arguments):
        given = ("--model", model_folder, "--data", data_file, "-n", 4, "--methods", "prompt-lookup")
        return shell("bench", verb, *given, "--lengths", "64,600", "--ignore-eos", "--json", *arguments)

    return run


def last(ended):
    assert ended.code in (0, 130), ended.err
    return json.loads(ended.out.splitlines()[-1])


def test_a_table_and_json(measured):
    ended = measured("acceptance")
    found = last(ended)
    assert [
        (r["method"], r["temperature"], r["length"], r["rope_factor"], r["prompts"], r["context_tokens"])
        for r in found["rows"]
    ] == [
        ("prompt-lookup", t, length, factor, prompts, length)
        for t in (0.0, 1.0)
        for length, factor, prompts in ((64, None, 2), (600, 2.0, 1))
    ]
    assert all(r["new_tokens"] == 3 * r["prompts"] and r["mean_accepted_length"] >= 1 for r in found["rows"])
    assert found["complete"] and "600 tokens: 1 of 2 texts are not that long" in found["notes"][0]
    for text in (
        "Mean accepted length: made-up, greedy",
        "600 x2",
        "1 of 2 texts",
    ):
        assert text in ended.out


def test_a_results_file_is_gone_on_with_and_added_to(measured, tmp_path):
    """Also one of an earlier version, whose runs lack their seconds."""
    path = tmp_path / "r.jsonl"
    given = ("--lengths", 64, "--results", path)
    first = last(measured("acceptance", *given))["rows"]
    head, *lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    later = {"seconds", "first_token_seconds"}
    old = [json.dumps({k: x for k, x in json.loads(text).items() if k not in later}) + "\n" for text in lines[:2]]
    path.write_text(head + "".join(old) + lines[2][:50])
    second = measured("acceptance", *given)
    assert last(second)["rows"] == first
    assert "2 runs are in" in second.err and "2 are left" in second.err
    more = last(measured("acceptance", *given, "--methods", "prompt-lookup,ar", "-t", 0, "--lengths", "48,64"))["rows"]
    assert [(r["method"], r["length"]) for r in more] == [
        ("prompt-lookup", 48), ("ar", 48), ("prompt-lookup", 64), ("ar", 64),
    ]  # fmt: skip
    assert more[2] == first[0] and more[3]["mean_accepted_length"] == 1.0
    assert len(path.read_text().splitlines()) == 1 + 4 + 6
    for other, said in (("--seed=3", "settings.seed: 0 there, 3 here"), ("--no-foresee", "settings.foresee")):
        ended = measured("acceptance", *given, other)
        assert ended.code == 2 and said in ended.err
    timed = last(measured("length", "--lengths", 64, "--results", path))[
        "rows"
    ]  # the same file: what has seconds stays
    assert [row["break_even"] is not None for row in timed] == [True, True]


def test_ctrl_c_keeps_what_is_done(measured, tmp_path, press_ctrl_c):
    press_ctrl_c(Speculator, "stream", 2)
    ended = measured("acceptance", "--results", tmp_path / "r.jsonl")
    assert ended.code == 130 and "Stopped after 1 of 6 runs" in ended.err
    found = last(ended)
    assert len(found["rows"]) == 1 and not found["complete"]
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 2


def test_figures(measured, tmp_path):
    pytest.importorskip("matplotlib")
    assert measured("acceptance", "--lengths", "48,64", "--svg", tmp_path / "f.svg").code == 0
    assert {path.name for path in tmp_path.glob("*.svg")} == {"f-t0.svg", "f-t1.svg"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "64,x"], "--lengths"),
        (["--lengths", "0"], "context"),
        (["--lengths", "2"], "2 tokens"),
        (["--lengths", "4096"], "4,096 tokens"),
        (["--lengths", "2000", "--rope-factor", "2"], "factor"),
        (["--temperature", "-1"], "temperature"),
        (["--methods", "nothing"], "'nothing'"),
        (["--methods", "hf"], "--methods"),
        (["--short", "cut"], "leave"),
    ],
)
def test_what_cannot_be(measured, arguments, message):
    ended = measured("acceptance", *arguments)
    assert ended.code == 2 and message in ended.err


def test_a_model_without_a_draft(shell, model_folder, data_file):
    ended = shell("bench", "acceptance", "--model", model_folder, "--data", data_file, "--lengths", 64)
    assert ended.code == 2 and "--draft" in ended.err


def test_break_even_here(measured, tmp_path):
    given = ("--lengths", "64,128", "--short", "keep", "-n", 8, "--markdown", tmp_path / "r.md")
    ended = measured("length", *given)
    found = last(ended)
    assert [(r["method"], r["length"]) for r in found["rows"]] == [
        (name, n) for n in (64, 128) for name in ("ar", "prompt-lookup")
    ]
    for row in found["rows"]:
        # A round's seconds over a step's, from which accepted length and speed-up follow.
        assert row["break_even"] > 0 and row["prompts"] == 2
        if row["method"] == "ar":
            assert row["break_even"] == pytest.approx(1.0) and row["mean_accepted_length"] == 1.0
    assert "accepted / break-even" in ended.out and "break-even" in (tmp_path / "r.md").read_text()


def test_lengths_double():
    assert doubled(1024, 8192) == (1024, 2048, 4096, 8192)
    assert doubled(1024, 5000) == (1024, 2048, 4096, 5000)
    assert doubled(1024, 512) == (512,)


class Stub(BaseHTTPRequestHandler):
    """A server that drafts: of five tokens behind the first, three were drafted. It may say so."""

    says = "llama.cpp"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        body = json.dumps({"data": [{"id": "stub"}]})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream"] and asked["temperature"] == 0
        self.send_response(200)
        self.end_headers()
        for text in ("one", " two three", " four five six"):
            chunk = {"choices": [{"delta": {"content": text}}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        end = {"choices": [], "usage": {"prompt_tokens": len(asked["messages"][0]["content"]), "completion_tokens": 6}}
        if self.says == "llama.cpp":
            end["timings"] = {"draft_n": 4, "draft_n_accepted": 3}
        self.wfile.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())


@pytest.mark.parametrize("says", ["llama.cpp", "nothing"])
def test_servers(shell, says, data_file, tmp_path):
    stub = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Stub,), {"says": says}))
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{stub.server_port}/v1"
    ended = shell("bench", "length", "--url", f"ar={url}", "--url", f"drafts={url}", "--data", data_file, "--lengths",
                  "64", "--limit", 1, "--results", tmp_path / "r.jsonl", "--json")  # fmt: skip
    stub.shutdown()
    stub.server_close()
    plain, drafts = last(ended)["rows"]
    assert plain["mean_accepted_length"] == 1.0
    assert drafts["mean_accepted_length"] == (None if says == "nothing" else 2.5)
    if says != "nothing":
        assert drafts["break_even"] == pytest.approx(2.5 / drafts["speedup_vs_ar"])
    assert drafts["context_tokens"] > 64 and drafts["ttft_seconds"] > 0 and drafts["tokens_per_second"] > 0
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1 + 2


def test_a_server_gets_what_an_agent_did_as_messages(shell, tmp_path):
    asked = []

    class Handler(Stub):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            body = self.rfile.read(length)
            asked.append(json.loads(body))
            self.rfile = io.BytesIO(body)
            super().do_POST()

    call = {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
    done = [
        {"role": "user", "content": "mend it"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a.py"}, {"role": "assistant", "content": "mended"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "run"}}]
    (tmp_path / "runs.jsonl").write_text(json.dumps({"messages": done, "tools": tools}))
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    ended = shell("bench", "length", "--url", f"ar=http://127.0.0.1:{stub.server_port}", "--lengths", "4000",
                  "--data", f"trajectories={tmp_path / 'runs.jsonl'}", "--repeats", 1, "--json")  # fmt: skip
    stub.shutdown()
    stub.server_close()
    assert last(ended)["rows"][0]["prompts"] == 2
    first, second = (each["messages"] for each in asked)
    assert [m["role"] for m in first] == ["user"] and [m["role"] for m in second] == ["user", "assistant", "tool"]
    assert json.loads(second[1]["tool_calls"][0]["function"]["arguments"]) == {"command": "ls"}
    assert all(each["tools"] == tools for each in asked)


def test_needles_stay_in_a_text_that_is_cut_for_servers():
    asked: list[str] = []

    class Recording:
        name, model, url = "ar", "stub", "http://stub"

        def answer(self, asked_for, prompt, *more):
            asked.append(prompt.text)
            return Accepted(asked_for, len(prompt.text), 2, 2, (), 0.1, 0.1)

    samples = tasks.read(["niah_single"], 1)
    experiment = Experiment(steps([Recording()], samples, [200], 4), lambda run: run.asked)
    assert len(list(experiment.run(lambda what: lambda name: None))) == 1 and len(asked[0]) < 1000
    assert samples[0].needles[0][1] in asked[0]


def test_a_server_that_is_not_there(shell, data_file):
    with pytest.raises(CapabilityError, match="cannot be reached"):
        Server("x", "http://127.0.0.1:9")
    ended = shell("bench", "length", "--url", "http://127.0.0.1:9", "--data", data_file)
    assert ended.code == 2 and "cannot be reached" in ended.err
