"""Replicas on Ray on this machine: start, kill one, drain; and a batch on two engines, of which one is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("ray")
pytest.importorskip("fastapi")

import psutil

from longdraft import Speculator, load
from tests.serve.over_http import http, wait_until
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow
ENVIRONMENT = os.environ | {"COLUMNS": "200", "LONGDRAFT_PLAN": "fixed", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(context=512).save_pretrained(folder)
    tiny_tokenizer(chat=True).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def running(*arguments):
    """A process of the command; at last it is killed, and Ray's processes with it."""
    command = [sys.executable, "-m", "longdraft", *map(str, arguments)]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        yield run
    finally:
        children = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
        for process in (*children, run):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.wait()


def workers(run, name):
    """Ray's processes below a run with a name in their titles."""
    children = psutil.Process(run.pid).children(recursive=True)
    return [process for process in children if process.is_running() and name in " ".join(process.cmdline()[:1])]


def ask(url, question, tokens=40):
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0}
    return http(f"{url}/v1/chat/completions", body, timeout=120)


def test_two_replicas_one_is_killed_and_the_rest_is_drained(model_folder):
    loaded = load(model_folder)
    spec = Speculator("ar", loaded.model, loaded.tokenizer)
    options = "--method", "prompt-lookup,ar", "--port", "0", "--slots", "2", "--ray", "--replicas", "2"
    with running("serve", "--model", model_folder, *options, "--threads", "1") as run:
        printed = ""
        while not (address := re.search(r"(http://127\.0\.0\.1:\d+)/v1", printed)) and (line := run.stderr.readline()):
            printed += line
        assert address, printed
        url = address[1]
        assert len(workers(run, "replica")) == 2
        prompts = [f"{i} asks who {i * i} is, and why?" for i in range(40)]
        expected = [spec.generate(prompt, max_new_tokens=40)[0].text for prompt in prompts]

        def cached(prompt):
            return json.loads(ask(url, prompt, 4)[1])["usage"]["prompt_tokens_details"]["cached_tokens"]

        # Requests with one prefix go to one replica, which has the prompt when it is asked again.
        for prompt in prompts[:4]:
            assert cached(prompt) < len(prompt)
            assert all(cached(prompt) >= len(prompt) for _ in range(3))
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(ask, url, prompt) for prompt in prompts]
            wait_until(lambda: any(answer.done() for answer in answers))
            workers(run, "replica")[0].kill()
            found = [answer.result() for answer in answers]
        assert [status for status, _ in found] == [200] * len(prompts)
        assert [json.loads(body)["choices"][0]["message"]["content"] for _, body in found] == expected
        wait_until(lambda: len(workers(run, "replica")) == 2, 90)  # Ray has started another one

        streams = [[] for _ in range(4)]

        def stream(lines):
            body = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 480, "temperature": 0}
            data = json.dumps(body | {"stream": True}).encode()
            request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                for line in answer:
                    lines += [line] if line.strip() else []

        threads = [threading.Thread(target=stream, args=(lines,)) for lines in streams]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(streams))
        run.send_signal(signal.SIGTERM)
        wait_until(lambda: http(f"{url}/ready")[0] == 503)
        assert any(thread.is_alive() for thread in threads) and ask(url, "late", 2)[0] == 503
        for thread in threads:
            thread.join()
        assert all(lines[-1].strip() == b"data: [DONE]" for lines in streams)
        assert run.wait(60) == 0 and "All requests have ended" in run.stderr.read()


def test_replicas_that_cannot_start_say_why(model_folder):
    options = "--port", "0", "--ray", "--context", "100000", "--threads", "1"
    with running("serve", "--model", model_folder, *options) as run:
        printed = run.communicate(timeout=180)[1]
        assert run.returncode == 2 and "the model's context holds" in printed


def test_a_batch_on_two_engines_of_which_one_is_killed(model_folder, tmp_path):
    rows = [{"prompt": f"what is {i} plus {i * 7}?", "max_tokens": 2 + i % 30} for i in range(500)]
    source, out, whole = tmp_path / "in", tmp_path / "out", tmp_path / "whole"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--model", model_folder, "--method", "prompt-lookup", "-t", "0.7", "--threads", "1"
    with running("batch", source, out, *options, "--ray", "2") as run:
        wait_until(lambda: run.poll() is not None or (out.exists() and out.read_bytes().count(b"\n") >= 50), 180)
        actors = workers(run, "Actor")
        assert len(actors) == 2 and out.read_bytes().count(b"\n") < 500
        actors[0].kill()
        printed = run.communicate(timeout=180)[1]
        assert run.returncode == 0, printed
    with running("batch", source, whole, *options) as alone:
        alone.communicate(timeout=180)
        assert alone.returncode == 0 and out.read_bytes() == whole.read_bytes()
