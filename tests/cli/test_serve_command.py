"""``longdraft serve`` as a process: it prints its address, answers, drains and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.serve.over_http import http

pytest.importorskip("fastapi")


def test_it_listens_answers_and_ends_when_asked_to(model_folder, tmp_path):
    (tmp_path / "keys.txt").write_text("# tenants\nme secret\n")
    command = [
        sys.executable, "-m", "longdraft", "serve", "--model", str(model_folder), "--port", "0", "--plan", "fixed",
        "--slots", "2", "--method", "prompt-lookup,ar", "--api-key-file", str(tmp_path / "keys.txt"),
        "--snapshots", str(tmp_path / "kept"),
    ]  # fmt: skip
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"})
    try:
        assert run.stderr is not None
        printed = ""
        while not (address := re.search(r"(http://127\.0\.0\.1:\d+)/v1", printed)) and (line := run.stderr.readline()):
            printed += line
        assert address, printed
        body = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 5, "temperature": 0}
        status, answer = http(f"{address[1]}/v1/chat/completions", body, authorization="Bearer secret")
        assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 5
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 0 and "All requests have ended" in run.stderr.read()
    finally:
        run.kill()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--method", "nonsense"), "nonsense"),
        (("--context", "100000"), "the model's context holds"),
        (("--api-key-file", "nowhere.txt"), "nowhere.txt"),
        (("--slots", "0"), "--slots"),
    ],
)
def test_options_that_cannot_be_served_are_refused_at_once(shell, model_folder, arguments, problem):
    ended = shell("serve", "--model", model_folder, *arguments)
    assert ended.code == 2 and problem in ended.err.replace("\n", " ")
