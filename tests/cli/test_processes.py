"""Commands that several processes run together under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.fixture(params=[0, 1])
def rank(request, monkeypatch):
    """This process as the first or second of two."""
    for name, value in {"WORLD_SIZE": 2, "RANK": request.param, "LOCAL_RANK": request.param}.items():
        monkeypatch.setenv(name, str(value))
    return request.param


REFUSED = [
    *((verb, f"longdraft {verb}") for verb in ("chat", "batch", "serve", "bench quality")),
    *((f"generate -p hello {words}", name) for words, name in (
        ("--kv-cache kept", "--kv-cache"), ("--file -", "standard input"), ("--device cpu", "--device"),
        ("--rope-factor 2", "--rope-factor"),
    )),
    ("bench --results kept", "--results"),
    ("bench --profile", "--profile"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "name"), REFUSED)
def test_what_several_processes_cannot_do_is_said_by_the_first(shell, rank, model_folder, words, name):
    ended = shell(*words.split(), "--model", model_folder, stdin=b"a document")
    assert (ended.code, ended.out) == (2, "")
    if rank:
        assert not ended.err
    else:
        last = ended.err.splitlines()[-1]
        assert last.startswith("error: ") and name in last


def test_the_embedded_model_is_not_shared_out(shell, rank):
    ended = shell("generate", "-p", "hello")
    assert ended.code == 2
    assert "Processes share a model of a folder" in ended.err if rank == 0 else not ended.err


def test_a_world_without_a_local_rank_is_one_process(shell, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert "no file or folder" in shell("generate", "-p", "hello", "--model", "/not/there").err


def by_two(words):
    """The same command by two processes."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "longdraft"]
    done = subprocess.run([*run, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], ["--temperature", "0.9", "--compare"]], ids=["greedy", "sampled"])
def test_generate_by_two_processes_is_that_of_one(shell, model_folder, settings):
    """Without --seed, all processes use the seed that is printed."""
    words = ["generate", "-p", "hello", "-n", "12", "--json", "--method", "prompt-lookup", "--plan", "fixed"]
    words += ["--model", str(model_folder), *settings]
    done = by_two(words)
    seed = ["--seed", done.stderr.split("Sampling with --seed ")[1].split()[0]] if settings else []
    (line,) = done.stdout.splitlines()
    shared, alone = json.loads(line), json.loads(shell(*words, *seed).out)
    assert {name: shared[name] for name in ("text", "token_ids", "rounds")} == {
        name: alone[name] for name in ("text", "token_ids", "rounds")
    }
    assert shared.get("compare", {}).get("tokens_agree", True)
    assert done.stderr.count("mean accepted length:") == 1


@pytest.mark.slow
def test_bench_by_two_processes_prints_once(model_folder):
    words = ["bench", "--quick", "--methods", "ar,prompt-lookup,hf", "--context", "200", "--limit", "1", "-n", "8"]
    done = by_two([*words, "--model", str(model_folder), "--json"])
    assert done.stdout.count("tokens/s: new tokens / decode seconds") == done.stderr.count("0 of ") == 1
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["method"] for row in rows] == ["ar", "prompt-lookup", "hf"]
    assert all(row["mismatches"] == 0 for row in rows)
