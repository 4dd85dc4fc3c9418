"""Answers of a server: the file, continuing after a kill, refusals, a server that fails."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from longdraft.errors import CapabilityError, CheckpointError, PromptError
from longdraft.training import answers
from longdraft.training.answers import AnswerFile, AnswerPrompt, generate_answers
from longdraft.training.documents import SkipCounts, encode_documents
from tests.support.tiny import tiny_tokenizer

pytest.importorskip("openai")
ASKED = [[AnswerPrompt(f"{n} {k}?", float(k % 2), "task", "a.txt") for k in range(3)] for n in range(4)]


class Stub(BaseHTTPRequestHandler):
    """Answers a question with itself, as an exclamation."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self._send({"data": [{"id": "stub", "object": "model"}], "object": "list"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.server.state
        with state["lock"]:
            state["asked"].append(body)
            state["flying"] += 1
            state["most"] = max(state["most"], state["flying"])
        time.sleep(0.02)
        text = body["messages"][-1]["content"]
        with state["lock"]:
            state["flying"] -= 1
            state["answered"] += 1
            fault = state["fault"](text, state["answered"])
        if fault == "broken":
            self.close_connection = True
        elif fault:
            self._send({"error": {"message": "no such thing"}}, fault)
        else:
            end = "length" if text == "3 0?" else "stop"
            message = {"role": "assistant", "content": text.replace("?", "!")}
            self._send(
                {
                    "id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
                    "choices": [{"index": 0, "message": message, "finish_reason": end}],
                    "usage": {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14},
                }
            )  # fmt: skip

    def _send(self, content, status=200):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


@pytest.fixture
def stub(monkeypatch):
    """A server, and its state: the requests, and ``fault``, the way in which its answers fail."""
    monkeypatch.setattr(answers, "RETRIES", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.state = {
        "lock": threading.Lock(), "asked": [], "flying": 0, "most": 0, "answered": 0, "fault": lambda text, count: None
    }  # fmt: skip
    server.state["url"] = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.state
    server.shutdown()
    server.server_close()


def run(stub, out, **over):
    file = AnswerFile(out)
    generate_answers(iter(ASKED), file, stub["url"], **({"rows": 12, "batch": 3, "max_new_tokens": 9} | over))
    return file


def rows_of(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_row_for_each_answer_as_training_reads_it(stub, tmp_path):
    out = tmp_path / "a.jsonl"
    file = run(stub, out)
    rows = {tuple(row["at"][:2]): row for row in rows_of(out)}
    assert file.num_refused == 0 and file.num_answers == len(rows) == 12 and 1 < stub["most"] <= 3
    assert {row["temperature"] for row in rows.values()} == {0.0, 1.0}
    said = [message["content"] for message in rows[1, 2]["messages"]]
    assert said == ["1 2?", "1 2!"] and rows[1, 2]["usage"] == [10, 4]
    assert file.usage == [120, 48] and file.new_tokens == 48
    assert {(row["source"], row["kind"]) for row in rows.values()} == {("a.txt", "task")}
    assert {body["model"] for body in stub["asked"]} == {"stub"} and {b["max_tokens"] for b in stub["asked"]} == {9}
    tokenizer = tiny_tokenizer(chat=True)
    texts = [tokenizer.decode(d.token_ids[d.start :]) for d in encode_documents([out], tokenizer, SkipCounts(), 61)]
    # An answer that was cut off does not end.
    assert len(texts) == 12 and {"3 0!", "3 1!<eos>"} <= {*texts}


def test_gone_on_after_a_kill(stub, tmp_path):
    out = tmp_path / "a.jsonl"
    seen = []
    run(stub, out, progress=lambda: seen.append(1), stop=lambda: len(seen) >= 4)
    kept = out.read_text()
    assert 4 <= len(seen) < 12
    out.write_text(kept + '{"messages": [' + "1, " * 500)  # as a kill leaves it
    before = len(stub["asked"])
    file = run(stub, out)
    assert file.num_answers == 12 and out.read_text().startswith(kept)
    assert len({tuple(row["at"]) for row in rows_of(out)}) == 12
    new = 12 - kept.count("\n")
    assert len(stub["asked"]) - before <= new + 4 and file.new_tokens < file.usage[1]
    assert run(stub, out).new_tokens == 0
    out.write_text(out.read_text() + '{"text": "mine"}\n')
    with pytest.raises(CheckpointError, match="Delete the file from that line on"):
        run(stub, out)


@pytest.mark.parametrize(("fault", "said"), [("broken", "cannot be reached any more"), (500, "no such thing")])
def test_a_server_that_breaks_off(stub, tmp_path, fault, said):
    stub["fault"] = lambda text, count: fault if count > 5 else None
    with pytest.raises(CapabilityError, match=said) as caught:
        run(stub, tmp_path / "a.jsonl")
    have = len(rows_of(tmp_path / "a.jsonl"))
    assert 1 <= have <= 5 and "continues from there" in str(caught.value)
    with pytest.raises(CapabilityError, match="cannot be reached"):
        run({"url": "http://127.0.0.1:9"}, tmp_path / "b.jsonl")


def test_prompts_that_a_server_refuses(stub, tmp_path, monkeypatch):
    stub["fault"] = lambda text, count: 400 if text.startswith("1") else None
    file = run(stub, tmp_path / "a.jsonl")
    assert file.num_answers == 9 and file.num_refused == 3
    monkeypatch.setattr(answers, "MAX_REFUSALS", 2)
    with pytest.raises(PromptError, match="no such thing"):
        run(stub, tmp_path / "b.jsonl")
