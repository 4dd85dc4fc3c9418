"""Replicas on Ray on this machine: start, kill one, drain; and a batch on two engines, of which one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("ray")
pytest.importorskip("fastapi")
import contextlib

import psutil

from longdraft import Speculator, load
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow
ENVIRONMENT = os.environ | {"COLUMNS": "200", "LONGDRAFT_PLAN": "fixed", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(context=512).save_pretrained(folder)
    tiny_tokenizer(chat=True).save_pretrained(folder)
    return folder


def started(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "longdraft", *map(str, arguments)], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def ended(run):
    """Ends what a test has left, Ray's processes with it."""
    children = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
    for process in (*children, run):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.wait()


def workers(run, name):
    """Processes of Ray's below a run whose titles have a name in them."""
    found = psutil.Process(run.pid).children(recursive=True)
    return [process for process in found if process.is_running() and name in " ".join(process.cmdline()[:1])]


def ask(url, said, tokens=40):
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": tokens, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ready(url):
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=60) as answer:
            return answer.status == 200
    except urllib.error.HTTPError:
        return False


def test_two_replicas_one_is_killed_and_the_rest_is_drained(model_folder):
    loaded = load(model_folder)
    spec = Speculator("ar", loaded.model, loaded.tokenizer)
    run = started(
        "serve", "--model", model_folder, "--method", "prompt-lookup,ar", "--port", "0", "--slots", "2", "--ray",
        "--replicas", "2", "--threads", "1",
    )  # fmt: skip
    try:
        said = ""
        while not (found := re.search(r"(http://127\.0\.0\.1:\d+)/v1", said)) and (line := run.stderr.readline()):
            said += line
        assert found, said
        url = found[1]
        assert len(workers(run, "replica")) == 2
        prompts = [f"{i} asks who {i * i} is, and why?" for i in range(40)]
        expected = [spec.generate(prompt, max_new_tokens=40)[0].text for prompt in prompts]

        def cached(prompt):
            return ask(url, prompt, 4)[1]["usage"]["prompt_tokens_details"]["cached_tokens"]

        # Requests of one prefix go to one replica: it knows the prompt whenever it is asked again.
        for prompt in prompts[:4]:
            assert cached(prompt) < len(prompt)
            assert all(cached(prompt) >= len(prompt) for _ in range(3))
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(ask, url, prompt) for prompt in prompts]
            while not any(answer.done() for answer in answers):
                time.sleep(0.01)
            workers(run, "replica")[0].kill()
            found = [answer.result() for answer in answers]
        assert [status for status, _ in found] == [200] * len(prompts)
        assert [body["choices"][0]["message"]["content"] for _, body in found] == expected
        until = time.monotonic() + 90
        while len(workers(run, "replica")) < 2 and time.monotonic() < until:
            time.sleep(0.2)
        assert len(workers(run, "replica")) == 2  # Ray has begun another one

        streams = [[] for _ in range(4)]

        def stream(into):
            body = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 480, "temperature": 0,
                    "stream": True}  # fmt: skip
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                for line in answer:
                    into += [line] if line.strip() else []

        threads = [threading.Thread(target=stream, args=(into,)) for into in streams]
        for thread in threads:
            thread.start()
        while not all(streams):
            time.sleep(0.005)
        run.send_signal(signal.SIGTERM)
        while ready(url):
            time.sleep(0.005)
        assert any(thread.is_alive() for thread in threads) and ask(url, "late", 2)[0] == 503
        for thread in threads:
            thread.join()
        assert all(lines[-1].strip() == b"data: [DONE]" for lines in streams)
        assert run.wait(60) == 0 and "All requests have ended" in run.stderr.read()
    finally:
        ended(run)


def test_replicas_that_cannot_start_say_why(model_folder):
    run = started("serve", "--model", model_folder, "--port", "0", "--ray", "--context", "100000", "--threads", "1")
    try:
        said = run.communicate(timeout=180)[1]
        assert run.returncode == 2 and "the model's context holds" in said
    finally:
        ended(run)


def test_a_batch_on_two_engines_of_which_one_is_killed(model_folder, tmp_path):
    rows = [{"prompt": f"what is {i} plus {i * 7}?", "max_tokens": 2 + i % 30} for i in range(500)]
    source, out, whole = tmp_path / "in", tmp_path / "out", tmp_path / "whole"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--model", model_folder, "--method", "prompt-lookup", "-t", "0.7", "--threads", "1"
    run = started("batch", source, out, *options, "--ray", "2")
    try:
        while run.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 50):
            time.sleep(0.01)
        actors = workers(run, "Actor")
        assert len(actors) == 2 and out.read_bytes().count(b"\n") < 500
        actors[0].kill()
        said = run.communicate(timeout=180)[1]
        assert run.returncode == 0, said
        alone = started("batch", source, whole, *options)
        alone.communicate(timeout=180)
        assert alone.returncode == 0 and out.read_bytes() == whole.read_bytes()
    finally:
        ended(run)
