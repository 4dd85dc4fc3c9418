"""``longdraft serve`` as a process: it prints its address, answers, drains and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from tests.serve.over_http import http
from tests.support import elsewhere

pytest.importorskip("fastapi")


def test_it_listens_answers_and_ends_when_asked_to(model_folder, tmp_path):
    (tmp_path / "keys.txt").write_text("# tenants\nme secret\n")
    words = [
        "--model", str(model_folder), "--port", "0", "--plan", "fixed", "--slots", "2", "--method", "prompt-lookup,ar",
        "--api-key-file", str(tmp_path / "keys.txt"), "--snapshots", str(tmp_path / "kept"), "--debug",
    ]  # fmt: skip
    said, address = tmp_path / "said", None
    run = elsewhere.start(said, elsewhere.command, "serve", *words)
    try:
        while not address:
            assert run.is_alive(), said.read_text()
            time.sleep(0.02)
            address = said.exists() and re.search(r"(http://127\.0\.0\.1:\d+)/v1", said.read_text())
        body = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 5, "temperature": 0}
        status, answer = http(f"{address[1]}/v1/chat/completions", body, authorization="Bearer secret")
        assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 5
        assert "POST /v1/chat/completions" in said.read_text()
        os.kill(run.pid, signal.SIGTERM)
        assert elsewhere.wait_for_exit(run, 30) == 0 and "All requests have ended" in said.read_text()
    finally:
        run.kill()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--method", "nonsense"), "nonsense"),
        (("--context", "100000"), "the model's context holds"),
        (("--api-key-file", "nowhere.txt"), "nowhere.txt"),
        (("--slots", "0"), "--slots"),
        (("--allow-origin", "localhost:3000/app"), "--allow-origin"),
    ],
)
def test_options_that_cannot_be_served_are_refused_at_once(shell, model_folder, arguments, problem):
    ended = shell("serve", "--model", model_folder, *arguments)
    assert ended.code == 2 and problem in ended.err.replace("\n", " ")
