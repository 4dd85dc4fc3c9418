"""A server of canned answers, for the page: it streams what the real one would, errors and slow answers included.

To look at the page by hand: ``python -m tests.serve.page_server 8001``. What the last line of a question begins with
says what comes: ``slow`` (an answer of about a minute), ``code`` (a code block, and markup that must stay text),
``think`` (a thought, a list, a link, fences), ``refuse`` (400, too long), ``busy`` (429 first), ``broken`` (an error in
the middle), ``gone`` (a connection that ends early), ``drain`` (503); anything else is answered at once.
"""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from longdraft.serve.page import page

METHODS = ["self", "ar", "prompt-lookup"]
PLAIN = (
    "The document describes three ways to read a long text. The first reads all of it for every token, which is exact "
    "and slow. The second keeps the last rows and a few chosen chunks, which is fast but forgets. The third drafts "
    "with the second and verifies with the first: it is exact, and as fast as drafts are good.\n\nIn short: draft "
    "with little, verify with everything."
)
CODE = (
    "A function that does it:\n\n```python\ndef accept(tree, logits):\n    path = [0]\n    while path[-1] in tree:\n"
    "        path.append(tree[path[-1]])\n    return path\n```\n\nMarkup stays text: <b>bold</b> <img src=x "
    "onerror=\"console.error('run')\"> and that is all."
)
THOUGHT = (
    "## Steps\n\n1. Read **it**\n2. Write `it`\n\n[more](https://example.org)\n\n````\n```\ninner\n```\n````\n\nEnd."
)


def tokens_of(text: str) -> list[str]:
    return re.findall(r" ?\w+|`{3}\n|\n| +(?= )|[^\w\n]", text)


def rounds(tokens: list[str], method: str) -> Iterator[dict[str, Any]]:
    """Rounds that emit the tokens: a tree each, some of whose nodes are accepted; none of method ``ar``."""
    chosen = random.Random(7)
    root, at, number, emitted = tokens[0], 1, 0, 0
    # The prompt's own forward gives the first token.
    first = {"phase": "round", "round": 0, "tree": None, "pieces": [[root, "target"]]}
    yield first | {"tokens_per_second": 0.0, "mean_accepted_length": 1.0}
    while at < len(tokens):
        accepted = 0 if method == "ar" else min(chosen.choice([0, 1, 3, 4, 6]), len(tokens) - at - 1)
        source = "lookup" if method == "prompt-lookup" or chosen.random() < 0.3 else "draft"
        names, parents, sources, path = [root], [-1], ["target"], [0]
        for token in tokens[at : at + accepted]:
            names.append(token)
            parents.append(path[-1])
            sources.append(source)
            path.append(len(names) - 1)
        for _ in range(0 if method == "ar" else chosen.randint(2, 9)):
            names.append(chosen.choice([" the", " a", " rows", " text", ".", " which", "\n"]))
            parents.append(chosen.randrange(len(names) - 1))
            sources.append(chosen.choice(["draft", "lookup"]))
        new = tokens[at : at + accepted + 1]
        at, emitted, number, root = at + len(new), emitted + len(new), number + 1, new[-1]
        tree = None
        if method != "ar":
            log_probs = [0.0, *(round(-3 * chosen.random(), 3) for _ in names[1:])]
            tree = {"tokens": names, "parents": parents, "sources": sources, "accepted": path, "log_probs": log_probs}
        yield {
            "phase": "round",
            "round": number,
            "tree": tree,
            "pieces": [[token, source if i < accepted else "target"] for i, token in enumerate(new)],
            "tokens_per_second": 21.5 if method == "ar" else 84.2 + chosen.random(),
            "mean_accepted_length": round(emitted / number, 2),
        }


class CannedServer(ThreadingHTTPServer):
    """On a port of this machine, 0: any that is free.

    Attributes:
        key: that requests need; empty: none. asked: bodies of the chats so far. left: chats whose client went away.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Answering)
        self.key = ""
        self.asked: list[dict[str, Any]] = []
        self.left = 0
        self.busy = 1  # 429s to give to a question that asks for them
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"

    def __enter__(self) -> CannedServer:
        threading.Thread(target=partial(self.serve_forever, 0.02), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Answering(BaseHTTPRequestHandler):
    server: CannedServer

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(200, page().encode(), "text/html; charset=utf-8")
        elif self.path != "/v1/models":
            self._error(404, "There is nothing here.")
        elif self._admitted():
            about = {"method": "self", "methods": METHODS, "context": 8192, "exact": True}
            found = {"object": "list", "data": [{"id": "canned-model", "object": "model", "longdraft": about}]}
            self._send(200, json.dumps(found).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._admitted():
            return
        self.server.asked.append(body)
        kind = body["messages"][-1]["content"].split("\n")[-1].split(" ")[0]
        if kind == "busy" and self.server.busy:
            self.server.busy -= 1
            self._error(429, "All slots are taken.", **{"Retry-After": "1"})
        elif kind == "refuse":
            self._error(400, "The prompt has 9,000 tokens, and 8,192 fit.")
        elif kind == "drain":
            self._error(503, "The server is shutting down.", **{"Retry-After": "5"})
        else:
            try:
                self._stream(kind, body)
            except (BrokenPipeError, ConnectionResetError):
                self.server.left += 1

    def _stream(self, kind: str, body: dict[str, Any]) -> None:
        method = body.get("method") or METHODS[0]
        text = {"code": CODE, "think": THOUGHT}.get(kind, PLAIN)
        told = list(rounds(tokens_of(text) * (20 if kind == "slow" else 1), method))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        time.sleep(1.2 if kind == "slow" else 0)
        for read in (2048, 4096, 7000):
            self._event(choices=[_choice("")], trace={"phase": "prefill", "read": read, "of": 7000})
            time.sleep(0.3 if kind == "slow" else 0.01)
        if kind == "think":
            self._event(choices=[_choice("") | {"delta": {"reasoning_content": "First *this*, then that."}}])
        for i, trace in enumerate(told):
            if kind == "broken" and i == 3:
                self._event(error={"message": "The engine failed.", "type": "server_error"})
                return
            if kind == "gone" and i == 3:
                return
            self._event(choices=[_choice("".join(piece for piece, _ in trace["pieces"]))], trace=trace)
            time.sleep(0.08 if kind == "slow" else 0.005)
        self._event(choices=[_choice("", "length" if body.get("max_tokens") == 7 else "stop")])
        self._event(choices=[], usage=_usage(told))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, **fields: Any) -> None:
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "canned-model", **fields}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def _admitted(self) -> bool:
        if not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return True
        self._error(401, "Give a valid API key.")
        return False

    def _error(self, status: int, message: str, **headers: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self._send(status, json.dumps({"error": error}).encode(), **headers)

    def _send(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def _choice(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}


def _usage(told: list[dict[str, Any]]) -> dict[str, Any]:
    trees = [trace["tree"] for trace in told if trace["tree"]]
    new = sum(len(trace["pieces"]) for trace in told)
    return {
        "prompt_tokens": 7000,
        "completion_tokens": new,
        "total_tokens": 7000 + new,
        "prompt_tokens_details": {"cached_tokens": 6144},
        "speculation": {
            "mean_acceptance_length": told[-1]["mean_accepted_length"],
            "num_drafts": len(trees),
            "num_draft_tokens": sum(len(tree["tokens"]) - 1 for tree in trees),
            "num_accepted_tokens": sum(len(tree["accepted"]) - 1 for tree in trees),
            "accepted_tokens_per_pos": [],
        },
    }


if __name__ == "__main__":
    with CannedServer(int(sys.argv[1]) if len(sys.argv) > 1 else 8001) as server:
        print(server.url)
        threading.Event().wait()
