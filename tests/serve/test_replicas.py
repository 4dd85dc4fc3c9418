"""Ray on this machine: replicas that start, are killed and drained."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

import psutil

from longdraft.errors import CapabilityError, RequestError
from longdraft.serve.ray import check_resources, connect, deployment_options, error_line
from longdraft.serve.settings import ServerSettings
from tests.serve.over_http import http, wait_until
from tests.support.tiny import tiny_model, tiny_tokenizer

ENVIRONMENT = os.environ | {"COLUMNS": "200", "LONGDRAFT_PLAN": "fixed", "RAY_USAGE_STATS_ENABLED": "0"}
SETTINGS = ServerSettings("m", ("ar",), slots=3, queue=5)


def test_the_commands_options_become_rays_and_what_ray_lacks_is_said(tmp_path, monkeypatch):
    def options(text=None):
        config = None if text is None else tmp_path / "config.yaml"
        if config and text:
            config.write_text(text)
        return deployment_options(SETTINGS, 2, cpus=2, gpus=0, config_file=config, drain_timeout=9)

    with pytest.raises(RequestError, match="--ray-config"):
        options("")  # no such file
    assert options()["num_replicas"] == 2 and options()["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0}
    found = options("num_replicas: 5\nhealth_check_period_s: 1\n")
    assert found["num_replicas"] == 5 and found["health_check_period_s"] == 1
    assert "num_replicas" not in options("autoscaling_config: {max_replicas: 4}\n")
    for text in ("- a", "a: [", "\n"):
        with pytest.raises(RequestError, match="--ray-config"):
            options(text)

    cluster = SimpleNamespace(cluster_resources=lambda: {"CPU": 4.0})
    check_resources(cluster, 2, 2, 0)
    for lacking, named in (((3, 2, 0), "CPU"), ((1, 1, 1), "GPU")):
        with pytest.raises(CapabilityError, match=named):
            check_resources(cluster, *lacking)
    monkeypatch.setenv("RAY_ADDRESS", "a cluster, which may grow")
    check_resources(cluster, 9, 9, 9)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CapabilityError, match="pip install"):
        connect()
    assert error_line("Traceback:\n  x\nValueError: because\n(Actor)") == "ValueError: because"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(context=512).save_pretrained(folder)
    tiny_tokenizer(chat=True).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def running(*arguments):
    """Runs the command in a process, which is killed at the end with Ray's processes."""
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
    """The run's child processes whose title has a name."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that was killed
            found += [process] if name in " ".join(process.cmdline()[:1]) else []
    return found


def ask(url, question, tokens=40, session="", **more):
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0, **more}
    status, answer = http(f"{url}/v1/chat/completions", body, timeout=120, **{"x-session-id": session})
    return status, answer.decode()


@pytest.mark.slow
def test_two_replicas_one_is_killed_and_the_rest_is_drained(model_folder, tmp_path):
    words = "--method", "prompt-lookup,ar", "--port", "0", "--slots", "2", "--ray", "--replicas", "2"
    with running("serve", "--model", model_folder, *words, "--threads", "1", "--snapshots", tmp_path) as run:
        printed = ""
        while not (address := re.search(r"(http://127\.0\.0\.1:\d+)/v1", printed)) and (line := run.stderr.readline()):
            printed += line
        assert address, printed
        url = address[1]
        assert len(workers(run, "replica")) == 2 and sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]

        def cached(question, session):
            usage = json.loads(ask(url, question, 4, session)[1])["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        for i in range(4):  # a session stays with the replica that has its prefix cached
            question = f"{i} asks who {i * i} is, and why?"
            assert cached(question, f"s{i}") < len(question)
            assert all(cached(question, f"s{i}") >= len(question) for _ in range(3))
        assert http(f"{url}/ready")[0] == 200 and ask(url, "?", temperature=-1)[0] == 400
        workers(run, "replica")[0].kill()
        wait_until(lambda: len(workers(run, "replica")) == 2, 90)  # Ray has started another one
        wait_until(lambda: all(ask(url, "who?", 2, f"s{i}")[0] == 200 for i in range(8)), 90)

        answers = []
        stream = lambda: answers.append(ask(url, "go on", 480, stream=True))  # noqa: E731
        threads = [threading.Thread(target=stream) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: json.loads(http(f"{url}/ready")[1])["running"] > 0)
        run.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert all(status == 200 and text.endswith("data: [DONE]\n\n") for status, text in answers)
        assert run.wait(60) == 0 and "All requests have ended" in run.stderr.read()


@pytest.mark.slow
def test_replicas_that_cannot_start_say_why(model_folder):
    words = "--port", "0", "--ray", "--context", "100000", "--threads", "1"
    with running("serve", "--model", model_folder, *words) as run:
        printed = run.communicate(timeout=180)[1]
        assert run.returncode == 2 and "the model's context holds" in printed
