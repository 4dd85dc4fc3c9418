"""``longdraft serve`` as a process: it says where it listens, answers, drains and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

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
        said = ""
        while not (found := re.search(r"(http://127\.0\.0\.1:\d+)/v1", said)) and (line := run.stderr.readline()):
            said += line
        assert found, said
        body = json.dumps(
            {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 5, "temperature": 0}
        ).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer secret"}
        asked = urllib.request.Request(f"{found[1]}/v1/chat/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 5
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 0 and "All requests have ended" in run.stderr.read()
    finally:
        run.kill()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "nonsense"), "nonsense"),
        (("--context", "100000"), "the model's context holds"),
        (("--api-key-file", "nowhere.txt"), "nowhere.txt"),
        (("--slots", "0"), "--slots"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(shell, model_folder, arguments, said):
    ended = shell("serve", "--model", model_folder, *arguments)
    assert ended.code == 2 and said in ended.err.replace("\n", " ")
