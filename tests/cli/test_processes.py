"""Commands that several processes run together under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from longdraft.cli import processes
from tests.serve.over_http import wait_until


@pytest.fixture(params=[0, 1])
def rank(request, monkeypatch):
    """This process as the first or second of two."""
    for name, value in {"WORLD_SIZE": 2, "RANK": request.param, "LOCAL_RANK": request.param}.items():
        monkeypatch.setenv(name, str(value))
    return request.param


@pytest.mark.parametrize("verb", ["chat", "batch", "bench quality", "bench needle"])
def test_commands_of_one_process_are_refused_and_the_first_process_says_so(shell, rank, verb):
    ended = shell(*verb.split(), "--model", "some")
    assert ended.code == 2 and not ended.out
    said = f"error: `longdraft {verb}` runs in one process, and 2 were started: start it without torchrun."
    assert ended.err.startswith(said) if rank == 0 else not ended.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--kv-cache", "kept"], "take no --kv-cache: leave it out"),
        (["--file", "-"], "take no standard input: leave it out"),
        (["--device", "cpu"], "--device cannot be chosen for a model that processes share"),
        (["--rope-factor", "2"], "--rope-factor cannot be chosen for a model that processes share"),
    ],
)
def test_what_generate_cannot_do_in_several_processes(shell, rank, model_folder, given, said):
    ended = shell("generate", "-p", "hello", "--model", model_folder, *given, stdin=b"a document")
    assert ended.code == 2 and not ended.out
    assert said in ended.err if rank == 0 else not ended.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["serve"], "runs in one process"),
        (["bench", "--results", "kept"], "take no --results: leave it out"),
        (["bench", "--profile"], "take no --profile: leave it out"),
    ],
)
def test_what_others_cannot_do_in_several_processes(shell, rank, model_folder, given, said):
    ended = shell(*given, "--model", model_folder)
    assert ended.code == 2 and not ended.out
    assert said in ended.err if rank == 0 else not ended.err


def test_where_the_launcher_is_gone_its_processes_end(rank, monkeypatch):
    gone, launcher = [], os.getppid()
    monkeypatch.setattr("os.kill", lambda *given: gone.append(given))
    with processes._launched(0.001):
        monkeypatch.setattr("os.getppid", lambda: launcher + 1)
        wait_until(lambda: gone)
    assert gone == [(os.getpid(), signal.SIGTERM)]


def test_the_embedded_model_is_not_shared_out(shell, rank):
    ended = shell("generate", "-p", "hello")
    assert ended.code == 2
    assert "Processes share a model of a folder" in ended.err if rank == 0 else not ended.err


def test_a_world_without_a_local_rank_is_one_process(shell, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert "no file or folder" in shell("generate", "-p", "hello", "--model", "/not/there").err


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], ["--temperature", "0.9", "--seed", "3", "--compare"]])
def test_generate_by_two_processes_is_that_of_one(shell, model_folder, settings):
    words = ["generate", "-p", "hello", "-n", "12", "--json", "--method", "prompt-lookup", "--plan", "fixed"]
    words += ["--model", str(model_folder), *settings]
    alone = json.loads(shell(*words).out)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "longdraft"]
    done = subprocess.run([*run, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    (line,) = done.stdout.splitlines()
    shared = json.loads(line)
    assert shared["token_ids"] == alone["token_ids"]
    assert shared.get("compare", {}).get("tokens_agree", True)
    assert done.stderr.count("mean accepted length:") == 1


@pytest.mark.slow
def test_bench_by_two_processes_prints_once(model_folder, tmp_path):
    words = ["bench", "--quick", "--methods", "ar,prompt-lookup,hf", "--context", "200", "--limit", "1", "-n", "8"]
    words += ["--model", str(model_folder), "--out", str(tmp_path / "found.json")]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "longdraft"]
    done = subprocess.run([*run, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("tokens/s: new tokens / decode seconds") == done.stderr.count("Measuring 1 of") == 1
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["ar", "prompt-lookup", "hf"]
    assert all(row["mismatches"] == 0 for row in rows)


@pytest.mark.slow
def test_a_seed_that_nobody_gave_is_that_of_all_processes(shell, model_folder):
    words = ["generate", "-p", "hello", "-n", "12", "--json", "--temperature", "1", "--method", "ar"]
    words += ["--model", str(model_folder)]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "longdraft"]
    done = subprocess.run([*run, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    seed = done.stderr.split("Sampling with --seed ")[1].split()[0]
    assert json.loads(done.stdout)["token_ids"] == json.loads(shell(*words, "--seed", seed).out)["token_ids"]
